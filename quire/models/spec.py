"""What a model is: a Hugging Face config.json, of either generation of transformers, read into frozen plain data.

Everything that would change the arithmetic and is not served is refused here, by name. Imports no torch, so that the
processes without a device read it as well; knows nothing about weights, tokenizers or memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quire.foundation.config.cache import element_bytes
from quire.models.config_file import ConfigFile
from quire.models.families import FAMILIES, HEADS, TEXT_MODELS, WRAPPERS, Family
from quire.models.head_spec import HeadSpec, read_head
from quire.models.kv_cache_groups import kv_groups, read_window, read_windowed_layers
from quire.models.quantization.description import Quantization
from quire.models.quantization.formats import GgufFormat
from quire.models.quantization.held_bytes import HeldWeights, expected_weights, held_in
from quire.models.quantization.parsers import read_quantization
from quire.models.rope_spec import RopeSpec, read_local_rope, read_rope
from quire.models.weights.tied_head import has_own_head
from quire.scheduling.kvcache.cache_groups import KVCacheGroup
from quire.scheduling.kvcache.rope_length_mode import RopeLengthMode

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes an element, by the dtype names of config.json."""


@dataclass(frozen=True)
class ExpertsSpec:
    """Experts in place of the MLP (mixture of experts).

    Attributes:
        count: Experts a layer, to which the router routes.
        chosen: How many each token goes to.
        width: Of one expert.
        renormalise: Whether the weights of the chosen ones are scaled to the sum 1.
        layers: Which layers have experts; the others have the usual MLP.
        of_others: Of a rank's share of the model: how many of a layer's experts other ranks have.
        engines: Whose tokens come to the experts of a rank: its own engine, or several that divide experts.
    """

    count: int
    chosen: int
    width: int
    renormalise: bool
    layers: frozenset[int]
    of_others: int = 0
    engines: int = 1

    @property
    def own(self) -> int:
        """Experts a layer whose weights are here."""
        return self.count - self.of_others


@dataclass(frozen=True)
class ModelSpec:
    """A decoder's shape and flags.

    Attributes:
        architecture: A key of FAMILIES, or of HEADS.
        family: What the architecture fixes.
        head_dim: Width of one head; `heads * head_dim` may differ from `hidden`.
        qkv_bias, out_bias, mlp_bias: Which projections have a bias.
        dtype: Name of the checkpoint's dtype, as config.json says it.
        max_model_len: Longest sequence that the model was made for, in tokens.
        eos_ids: End-of-sequence tokens of config.json (generation_config.json may name others).
        rope, local_rope: Of all layers; of those with a window, where theirs differs. None: no such thing.
        local: By layer: whether it is one of those that have the window.
        window: How many tokens a token sees in these layers, itself included.
        scales: By layer, what the products of queries and keys are multiplied with.
        attention_cap, logit_cap: Bounds c of attention scores and logits: c · tanh(x / c).
        experts: None: there are none.
        quantization: Of the weights; None: they are dense.
        held: What quantized weights take, by their files; None: there are none.
        tp: Of a rank's share of the model, into how many parts layers are divided; heads and widths are a part's. See
            rank_share.py.
        tables: Of the vocabulary's size; embedding and head, if they are two.
        groups: The KV groups of a share that has some of the layers: those of the whole model, with these layers. None:
            they follow from the layers.
        head: What makes it a draft head, which proposes tokens for another model. None: it is a model.
        untied: config.json ties the head to the embedding, and the files have two that differ.
    """

    architecture: str
    family: Family
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    dtype: str
    max_model_len: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    rope: RopeSpec | None
    local_rope: RopeSpec | None
    local: tuple[bool, ...]
    window: int | None
    scales: tuple[float, ...]
    attention_cap: float | None
    logit_cap: float | None
    experts: ExpertsSpec | None
    quantization: Quantization | None = None
    held: HeldWeights | None = None
    tp: int = 1
    tables: int | None = None
    groups: tuple[KVCacheGroup, ...] | None = None
    head: HeadSpec | None = None
    untied: bool = False

    @property
    def rope_length_mode(self) -> RopeLengthMode | None:
        """How the rotation of keys depends on the sequence's length, if it does."""
        return self.rope.length_mode if self.rope else None

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        q, kv, h = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        attention = h * (q + 2 * kv) + q * h + self.qkv_bias * (q + 2 * kv) + self.out_bias * h
        attention += self.family.qk_norm * 2 * self.head_dim
        norm = h * (2 if self.family.biases else 1)
        with_experts = len(self.experts.layers) if self.experts else 0
        mlps = (self.layers - with_experts) * self._mlp_parameters + with_experts * self._expert_parameters
        tables = (1 if self.tie_embeddings else 2) if self.tables is None else self.tables
        embeddings = -(-self.vocab_size // self.tp) * h * tables
        embeddings += 0 if self.family.rotary else self.max_model_len * h
        if (head := self.head) is not None:
            attention += h * (q + 2 * kv) + norm  # of embeddings beside states
            embeddings = self.vocab_size * h * head.own_embedding + head.vocab_size * h
            embeddings += len(head.sources_of(0)) * head.target_hidden * h
        return self.layers * (attention + self.family.norms * norm) + mlps + embeddings + norm

    @property
    def _mlp_parameters(self) -> int:
        width, h = self.intermediate, self.hidden
        ways_up = 2 if self.family.gated else 1
        return (ways_up + 1) * h * width + self.mlp_bias * (ways_up * width + h)

    @property
    def _expert_parameters(self) -> int:
        return self.hidden * (self.experts.count + self.experts.own * 3 * self.experts.width) if self.experts else 0

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights, those held in `dtype` and the quantized ones."""
        held = self.held
        if held is None:
            form = self.quantization.rules[0].format if self.quantization else None
            held = expected_weights(self.num_parameters, self.linear_weights, self.hidden, form)
        return held.dense * DTYPE_BYTES[dtype] + held.fixed

    @property
    def linear_weights(self) -> int:
        """Number of weights in projections, which leaves out biases, the head and routers."""
        q, kv, h = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        with_experts = len(self.experts.layers) if self.experts else 0
        ways = 3 if self.family.gated else 2
        mlps = (self.layers - with_experts) * ways * h * self.intermediate
        if self.experts:
            mlps += with_experts * self.experts.own * 3 * h * self.experts.width
        return self.layers * (h * (1 if self.head is None else 2) * (q + 2 * kv) + q * h) + mlps

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of keys and values that one token takes over all layers, of a type of `config/cache.py`."""
        return self.layers * self._layer_kv_bytes(kv_dtype)

    def kv_block_bytes(self, kv_dtype: str, block_size: int) -> int:
        """Bytes of one block: keys and values of `block_size` tokens over the layers of one group."""
        return block_size * max(len(group.layers) for group in self.kv_groups()) * self._layer_kv_bytes(kv_dtype)

    def _layer_kv_bytes(self, kv_dtype: str) -> int:
        return 2 * self.kv_heads * self.head_dim * element_bytes(kv_dtype, DTYPE_BYTES)

    def kv_groups(self) -> tuple[KVCacheGroup, ...]:
        """The groups of layers that share a block table."""
        if self.groups is not None:
            return self.groups
        return kv_groups([self.window if local else None for local in self.local])


def read_spec(directory: Path | str, quantization: str | None = None) -> ModelSpec:
    """Read `directory`/config.json.

    Args:
        quantization: As --quantization says it.

    Raises:
        CheckpointError: The file is missing or broken, or asks for something that is not served; it names what.
        ConfigError: --quantization is not served, or contradicts the file.
    """
    fields = ConfigFile(Path(directory) / "config.json")
    architecture = _architecture(fields)
    is_head = architecture in HEADS
    family = FAMILIES["LlamaForCausalLM" if is_head else architecture]
    fields.adopt(family.names, family.defaults)
    _refuse_what_changes_the_arithmetic(fields, family)
    hidden, heads = map(fields.count, ("hidden_size", "num_attention_heads"))
    layers = fields.count("num_hidden_layers", 1 if is_head else None)
    head_dim = fields.count("head_dim", max(1, hidden // heads))
    attention_bias = fields.flag("attention_bias") or family.biases
    rope = read_rope(fields, family, head_dim) if family.rotary else None
    max_len = fields.count("max_position_embeddings", 2048)
    untied = not is_head and fields.flag("tie_word_embeddings") and has_own_head(Path(directory))
    spec = ModelSpec(
        architecture=architecture,
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden=hidden,
        intermediate=fields.count("intermediate_size", None if family.gated else 4 * hidden),
        layers=layers,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=head_dim,
        activation=fields.choice("hidden_act", family.activations, "silu"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") or family.biases,
        tie_embeddings=fields.flag("tie_word_embeddings") and not untied,
        untied=untied,
        dtype=fields.dtype(tuple(DTYPE_BYTES)),
        max_model_len=rope.max_len(max_len) if rope else max_len,
        bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_ids=fields.token_ids("eos_token_id"),
        rope=rope,
        local_rope=read_local_rope(fields, family, head_dim),
        local=read_windowed_layers(fields, family, layers),
        window=read_window(fields),
        scales=_scales(fields, layers, head_dim),
        attention_cap=fields.optional_number("attn_logit_softcapping"),
        logit_cap=fields.optional_number("final_logit_softcapping"),
        experts=_experts(fields, family, layers),
        quantization=read_quantization(fields.get("quantization_config"), quantization),
        head=read_head(fields, Path(directory), hidden) if is_head else None,
    )
    if spec.quantization:
        spec = replace(spec, held=held_in(Path(directory), spec.quantization, spec.tie_embeddings))
    if spec.heads % spec.kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads ({spec.heads})")
    if rope and rope.width(head_dim) % 2:
        raise fields.wrong("head_dim", "must be even")
    return spec


def on_a_gpu(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the sizes of weights on a GPU, which keeps a GGUF file's weights in forms of its own."""
    form = spec.quantization.rules[0].format if spec.quantization else None
    return replace(spec, held=HeldWeights(form.gpu_dense, form.coded)) if isinstance(form, GgufFormat) else spec


def _architecture(fields: ConfigFile) -> str:
    """Return the architecture that is computed: for a model that reads images too, that of its text model."""
    names = fields.get("architectures", [])
    for name in names if isinstance(names, list) else []:
        if name in FAMILIES or name in HEADS:
            return str(name)
        if name in WRAPPERS:
            return _text_architecture(fields)
    raise fields.wrong("architectures", f"is not supported: served are {', '.join((*FAMILIES, *WRAPPERS))}")


def _text_architecture(fields: ConfigFile) -> str:
    inner = fields.get("text_config")
    kind = str(inner.get("model_type")) if isinstance(inner, dict) else ""
    text = TEXT_MODELS.get(kind)
    if text is None:
        raise fields.refused(
            "text_config", f"text_config has model_type {kind!r}: served are {', '.join(TEXT_MODELS)}."
        )
    fields.enter_text_config(text.sizes)
    return text.architecture


_ONLY: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
}
"""Keys of config.json that are refused unless they are absent or have one of these values."""


def _refuse_what_changes_the_arithmetic(fields: ConfigFile, family: Family) -> None:
    """Keys that a config may carry and that this engine would have to compute with, unless at these values."""
    if family.local_rope and fields.get("attn_logit_softcapping") is not None:
        raise fields.wrong("attn_logit_softcapping", "is not supported by this architecture")
    for key, values in _ONLY.items():
        if fields.get(key) is not None and fields.get(key) not in values:
            raise fields.wrong(key, "is not supported")


def _scales(fields: ConfigFile, layers: int, head_dim: int) -> tuple[float, ...]:
    width = fields.number("query_pre_attn_scalar", head_dim)
    scale = width**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx")
    return tuple(scale / (layer + 1) if by_layer else scale for layer in range(layers))


def _experts(fields: ConfigFile, family: Family, layers: int) -> ExpertsSpec | None:
    if not family.experts:
        return None
    key = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    chosen, step = fields.count("num_experts_per_tok"), fields.count("decoder_sparse_step", 1)
    dense = fields.layer_numbers("mlp_only_layers", layers)
    spec = ExpertsSpec(
        count=fields.count(key),
        chosen=chosen,
        width=fields.count("moe_intermediate_size", fields.count("intermediate_size")),
        renormalise=fields.flag("norm_topk_prob"),
        layers=frozenset(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0),
    )
    if chosen > spec.count:
        raise fields.wrong("num_experts_per_tok", f"must be at most {key} ({spec.count})")
    return spec
