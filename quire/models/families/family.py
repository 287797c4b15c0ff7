"""What an architecture is, in its difference to Llama; the modules beside this one list the architectures.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from quire.models.layer_spec import LayerSpec, MixtureSpec

if TYPE_CHECKING:
    from quire.models.config_file import ConfigFile
    from quire.models.spec import ModelSpec

ReadLayer: TypeAlias = "Callable[[ConfigFile, LayerSpec, int], LayerSpec]"
"""Returns what the layer of this number is, given what other readings make of it."""
GATED = ("silu", "gelu_pytorch_tanh")
"""Activations of MLPs with a gate."""


@dataclass(frozen=True)
class ModuleNames:
    """A checkpoint's names of a model's modules. Those in a layer stand behind the layer's.

    Attributes:
        embedding, norm, head: The embedding of tokens, the norm after the last layer (empty: there is none), and the
            head to logits.
        positions: The embedding of positions; empty: the model has none.
        embedding_norm: The norm of the tokens' embeddings.
        token_types: The embedding of token types.
        embedding_projection: The projection of embeddings that are narrower than the stream.
        layer: What the names in a layer begin with; {} stands for its number.
        norms: A layer's norms of the stream, in the order of their use.
        qkv: Queries, keys and values; one name: they are stored as one projection.
        qkv_layout: How a projection of queries, keys and values stores them (qkv_layout.py).
        out: The output projection of attention.
        query_norm, key_norm: The norms of queries and keys.
        gate: The projection that gates attention's output.
            Empty: it is stored with the queries, behind each head's.
        recurrent: What the names of a recurrent mixer begin with.
        delta_in: The projection of queries, keys, values and the output's gate of the gated delta rule, stored for one
            head of keys after the other; two names: of queries, keys and values, and of the gate;
            four names: of each by itself.
        delta_gates: The projections of the rule's β and decays, stored like `delta_in`.
        delta_norm: The norm of the rule's output.
        delta_out: The output projection of recurrent mixers.
        query_latent, query_latent_norm, query_up: The projection of the input to the latent of queries, the latent's
            norm, and its projection to queries.
        latent, latent_norm, expansion: The projection of the input to the latent of keys and values and the shared part
            of keys, the latent's norm, and its projection to keys and values.
        up: Gate and up; one name: they are stored as one projection, or the MLP has no gate.
        up_first: Whether the one projection stores up before gate.
        down: The output projection of the MLP.
        activation: What the names of an activation's parameters begin with.
        sinks: The scores that softmaxes start with, one for each query head.
        router: The projection that chooses experts.
        experts: What the experts' names begin with, before their numbers.
        expert: Gate, up and down of one expert; an empty gate: there is none.
        correction: The tensor that corrects experts' scores for the choice.
        expert_factors: The tensor of the factors of experts' weights.
        expert_latents: The projections to what experts read, and of what they write.
        shared_up: Gate and up of the shared expert; one name: they are stored as one projection.
        shared_down: The output projection of the shared expert.
        shared_gate: The projection whose σ multiplies the shared expert's output.
        transposed: Whether projections are stored as [in, out].
        transposed_experts: Whether experts that are stored as one tensor are [experts, in, out].
        others: Parts of names that transformers gives modules in memory, and what the names above have in their place.
            Checkpoints that other tools save have these.
        older: Beginnings of names in some checkpoints, each with what it stands for.
        unbiased: Ends of names of modules that have no bias where others of their product have one: theirs are zeros.
        cross_qkv, cross_out: Queries, keys, values and the output projection of attention to an encoder's states.
        unread: Beginnings of names of modules that are not computed, such as a pooler that embeddings do without.
        unread_in_layers: Modules in layers that are not computed, and tensors that config.json tells as well.
        joined: Ends of names of tensors that some checkpoints have in parts, each with those of the parts.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    positions: str = ""
    embedding_norm: str = ""
    token_types: str = ""
    embedding_projection: str = ""
    layer: str = "model.layers.{}"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_layout: Literal["kinds", "groups", "four blocks"] = "kinds"
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate: str = "self_attn.gate_proj"
    recurrent: str = "mixer"
    delta_in: tuple[str, ...] = ("in_proj_qkvz",)
    delta_gates: tuple[str, ...] = ("in_proj_ba",)
    delta_norm: str = "norm"
    delta_out: str = "out_proj"
    query_latent: str = "self_attn.q_a_proj"
    query_latent_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    latent: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    expansion: str = "self_attn.kv_b_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    up_first: bool = False
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    sinks: str = "self_attn.sinks"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    correction: str = "mlp.gate.e_score_correction_bias"
    expert_factors: str = ""
    expert_latents: tuple[str, str] = ("", "")
    shared_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    transposed: bool = False
    transposed_experts: bool = False
    others: tuple[tuple[str, str], ...] = ()
    older: tuple[tuple[str, str], ...] = ()
    unbiased: tuple[str, ...] = ()
    cross_qkv: tuple[str, str, str] = ("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj")
    cross_out: str = "encoder_attn.out_proj"
    unread: tuple[str, ...] = ()
    unread_in_layers: tuple[str, ...] = ()
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def projections(self, layer: LayerSpec) -> Iterator[tuple[str, int]]:
        """Yield a module of each part of a layer, by its name in the layer, and the weights of the part's products."""
        out = f"{self.recurrent}.{self.delta_out}" if layer.mixer.state_form() else self.out
        yield out, layer.mixer.weights().linear
        mlp = layer.mlp
        if not isinstance(mlp, MixtureSpec):
            yield self.down, mlp.weights().linear
            return
        yield f"{self.experts}.0.{self.expert[2]}", mlp.own * mlp.expert_weights
        if mlp.shared is not None:
            yield self.shared_down, mlp.shared.weights().linear


@dataclass(frozen=True)
class Family:
    """One architecture, in its difference to Llama.

    Attributes:
        decoder: The class that builds the model, as "module:class".
        modules: The checkpoint's names of modules.
        names: The architecture's names of keys in config.json, by Llama's names; of several, the first that a file has.
        defaults: Values of missing keys, where they differ from Llama's.
        only: The values that are served of keys that change the arithmetic; a file with others is refused.
        activations: The values of `hidden_act` that are served.
        windows: Which layers have the `sliding_window`: none, all, or the ones that `layer_types` names. With `from`,
            `layer_types` names them too; without `layer_types`, they are the layers from `max_window_layers` on. With
            `chunks`, none has, and `read_layer` reads `layer_types`.
        local_rope: Whether layers with a window have a rotary embedding of their own.
        partial_rotary: Whether `partial_rotary_factor` is read.
        mixer, mlp, norms: The properties of each layer's `AttentionSpec`, `MlpSpec` and `NormSpec` that the
            architecture fixes.
        read_layer: Returns a layer with what else differs, given Llama's reading of it (with all of the above) and its
            number.
        read_model: Returns the model with what differs outside of the layers, given Llama's reading of it.
        overflows_float16: Whether activations become larger than float16 can hold.
    """

    decoder: str = "quire.models.decoder:Decoder"
    modules: ModuleNames = ModuleNames()
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    activations: tuple[str, ...] = GATED
    windows: Literal["none", "all", "by type", "from", "chunks"] = "none"
    local_rope: bool = False
    partial_rotary: bool = False
    mixer: Mapping[str, Any] = field(default_factory=dict)
    mlp: Mapping[str, Any] = field(default_factory=dict)
    norms: Mapping[str, Any] = field(default_factory=dict)
    read_layer: ReadLayer | None = None
    read_model: Callable[[ConfigFile, ModelSpec], ModelSpec] | None = None
    overflows_float16: bool = False
