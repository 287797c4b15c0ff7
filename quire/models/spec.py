"""Reads what a model is from a Hugging Face config.json of transformers 4 or 5, into frozen plain data.

Everything that would change the arithmetic and is not served is refused here, by name. Does not import torch, so that
processes without a device read it too. Knows nothing about weights, tokenizers or memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quire.foundation.config.cache import element_bytes
from quire.models.config_file import ConfigFile
from quire.models.families import FAMILIES, HEADS, TEXT_MODELS, WRAPPERS, Family
from quire.models.head_spec import HeadSpec, read_head
from quire.models.kv_cache_groups import kv_groups, read_window, read_windowed_layers
from quire.models.layer_spec import AttentionSpec, LayerSpec, MixtureSpec, MlpSpec, NormSpec
from quire.models.quantization.formats import GgufFormat, Quantization
from quire.models.quantization.held_bytes import HeldWeights, expected_weights, held_in
from quire.models.quantization.parsers import read_quantization
from quire.models.rope_spec import RopeSpec, read_local_rope, read_rope
from quire.models.weights.safetensors_files import has_own_head
from quire.scheduling.kvcache.cache_groups import KVCacheGroup
from quire.scheduling.kvcache.rope_length_mode import RopeLengthMode

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by config.json's names of dtypes."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: its layers, and what comes before and after them.

    Attributes:
        architecture: A key of FAMILIES, or of HEADS.
        family: The fixed properties of the architecture.
        vocab_size: Number of tokens in the vocabulary.
        hidden: Width of the residual stream.
        layers: All layers, in order.
        norm: The norm after the last layer.
        learned_positions: Whether positions are embeddings that are added to the tokens'.
        tie_embeddings: Whether the head's weight is the embedding's.
        dtype: config.json's name of the checkpoint's dtype.
        max_model_len: Longest sequence that the model was made for, in tokens.
        eos_ids: End-of-sequence tokens of config.json (generation_config.json may name others).
        logit_cap: Bound c of logits, c · tanh(x / c); None: no bound.
        quantization: How weights are quantized; None: they are dense.
        held: Memory of quantized weights, as computed from their files; None: weights are dense.
        tp: Number of parts that layers are divided into, in a rank's share of the model (rank_share.py).
        tables: Number of tables of the vocabulary's size (the embedding, and an untied head); None: `tie_embeddings`
            decides.
        groups: KV groups of a share that has some of the layers: the whole model's groups with these layers only. None:
            the layers decide.
        head: The properties of a draft head; None: this is a model, not a draft head.
        untied: Whether config.json ties the head to the embedding, but the files have two that differ.
    """

    architecture: str
    family: Family
    vocab_size: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    learned_positions: bool
    tie_embeddings: bool
    dtype: str
    max_model_len: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    logit_cap: float | None
    quantization: Quantization | None = None
    held: HeldWeights | None = None
    tp: int = 1
    tables: int | None = None
    groups: tuple[KVCacheGroup, ...] | None = None
    head: HeadSpec | None = None
    untied: bool = False

    @property
    def attention(self) -> AttentionSpec:
        """Attention of the first layer. All layers have equal numbers of heads of equal width; windows, scales and rope
        may differ.
        """
        return self.layers[0].mixer

    @property
    def mixture(self) -> MixtureSpec | None:
        """Experts of the first layer that has any; all such layers are alike. None: no layer has experts."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureSpec)), None)

    @property
    def layers_with_experts(self) -> int:
        return sum(isinstance(layer.mlp, MixtureSpec) for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary embeddings that layers have, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.mixer.rope for layer in self.layers if layer.mixer.rope is not None))

    @property
    def rope_length_mode(self) -> RopeLengthMode | None:
        """How the rotation of keys depends on the sequence's length; None: it does not."""
        return next((rope.length_mode for rope in self.ropes if rope.length_mode is not None), None)

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        h, head = self.hidden, self.head
        tables = (1 if self.tie_embeddings else 2) if self.tables is None else self.tables
        around = -(-self.vocab_size // self.tp) * h * tables + self.learned_positions * self.max_model_len * h
        if head is not None:
            around = self.vocab_size * h * head.own_embedding + head.vocab_size * h
            around += len(head.sources_of(0)) * head.target_hidden * h
        return around + sum(map(sum, (layer.weights() for layer in self.layers))) + sum(self.norm.weights(h))

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of all weights, quantized ones and the ones kept in `dtype`."""
        held = self.held
        if held is None:
            form = self.quantization.rules[0].format if self.quantization else None
            held = expected_weights(self.num_parameters, self.linear_weights, self.hidden, form)
        return held.dense * DTYPE_BYTES[dtype] + held.fixed

    @property
    def linear_weights(self) -> int:
        """Number of weights in projections, without biases, the head and routers."""
        return sum(layer.weights().linear for layer in self.layers)

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the bytes of one token's keys and values in all layers. `kv_dtype` is a type of `config/cache.py`."""
        return sum(layer.mixer.cached_elements for layer in self.layers) * element_bytes(kv_dtype, DTYPE_BYTES)

    def kv_block_bytes(self, kv_dtype: str, block_size: int) -> int:
        """Return the bytes of one block: keys and values of `block_size` tokens over the layers of one group."""
        layers = max(len(group.layers) for group in self.kv_groups())
        return block_size * layers * self.attention.cached_elements * element_bytes(kv_dtype, DTYPE_BYTES)

    def kv_groups(self) -> tuple[KVCacheGroup, ...]:
        """Return the groups of layers that share a block table."""
        return kv_groups([layer.mixer.window for layer in self.layers]) if self.groups is None else self.groups


def read_spec(directory: Path | str, quantization: str | None = None) -> ModelSpec:
    """Read `directory`/config.json.

    Args:
        quantization: The value of --quantization; None: it was not given.

    Raises:
        CheckpointError: The file is missing or broken, or asks for something that is not served; the message names it.
        ConfigError: --quantization is not served, or contradicts the file.
    """
    fields = ConfigFile(Path(directory) / "config.json")
    architecture = _architecture(fields)
    is_head = architecture in HEADS
    family = FAMILIES["LlamaForCausalLM" if is_head else architecture]
    fields.adopt(family.names, family.defaults)
    _refuse_what_changes_the_arithmetic(fields, family)
    hidden = fields.count("hidden_size")
    layers, rope = _layers(fields, family, hidden, is_head=is_head)
    max_len = fields.count("max_position_embeddings", 2048)
    untied = not is_head and fields.flag("tie_word_embeddings") and has_own_head(Path(directory))
    spec = ModelSpec(
        architecture=architecture,
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden=hidden,
        layers=layers,
        norm=replace(layers[0].norms, number=1),
        learned_positions=not family.rotary,
        tie_embeddings=fields.flag("tie_word_embeddings") and not untied,
        untied=untied,
        dtype=fields.dtype(tuple(DTYPE_BYTES)),
        max_model_len=rope.max_len(max_len) if rope else max_len,
        bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_ids=fields.token_ids("eos_token_id"),
        logit_cap=fields.optional_number("final_logit_softcapping"),
        quantization=read_quantization(fields.get("quantization_config"), quantization),
        head=read_head(fields, Path(directory), hidden) if is_head else None,
    )
    if spec.quantization:
        spec = replace(spec, held=held_in(Path(directory), spec.quantization, spec.tie_embeddings))
    return spec


def on_a_gpu(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the sizes of weights on a GPU, which keeps a GGUF file's weights in other forms."""
    form = spec.quantization.rules[0].format if spec.quantization else None
    return replace(spec, held=HeldWeights(form.gpu_dense, form.coded)) if isinstance(form, GgufFormat) else spec


def _architecture(fields: ConfigFile) -> str:
    """Return the architecture that is computed; for a model that also reads images, it is the text model's."""
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
    """Refuse keys that change the arithmetic, unless they have the values of _ONLY."""
    if family.local_rope and fields.get("attn_logit_softcapping") is not None:
        raise fields.wrong("attn_logit_softcapping", "is not supported by this architecture")
    for key, values in _ONLY.items():
        if fields.get(key) is not None and fields.get(key) not in values:
            raise fields.wrong(key, "is not supported")


def _layers(
    fields: ConfigFile, family: Family, hidden: int, *, is_head: bool
) -> tuple[tuple[LayerSpec, ...], RopeSpec | None]:
    """Return all layers, and the rotary embedding of layers without a window, which limits the length of sequences."""
    heads, number = fields.count("num_attention_heads"), fields.count("num_hidden_layers", 1 if is_head else None)
    head_dim = fields.count("head_dim", max(1, hidden // heads))
    rope = read_rope(fields, family, head_dim) if family.rotary else None
    local_rope, window = read_local_rope(fields, family, head_dim) or rope, read_window(fields)
    attention_bias = fields.flag("attention_bias") or family.biases
    attention = AttentionSpec(
        inputs=2 * hidden if is_head else hidden,
        outputs=hidden,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=head_dim,
        cap=fields.optional_number("attn_logit_softcapping"),
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias,
    )
    if heads % attention.kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads ({heads})")
    if rope and rope.width(head_dim) % 2:
        raise fields.wrong("head_dim", "must be even")
    mlp = MlpSpec(
        hidden,
        fields.count("intermediate_size", None if family.gated else 4 * hidden),
        fields.choice("hidden_act", family.activations, "silu"),
        family.gated,
        fields.flag("mlp_bias") or family.biases,
    )
    norms = NormSpec(
        "layer" if family.biases else "rms",
        fields.number("rms_norm_eps", 1e-6),
        family.unit_offset,
        family.norms + is_head,  # a head norms embeddings and states
    )
    local, scales = read_windowed_layers(fields, family, number), _scales(fields, number, head_dim)
    layers = tuple(
        LayerSpec(
            replace(attention, scale=scale, **({"window": window, "rope": local_rope} if is_local else {"rope": rope})),
            mixture or mlp,
            norms,
        )
        for scale, is_local, mixture in zip(scales, local, _mixtures(fields, family, hidden, number), strict=True)
    )
    return layers, rope


def _scales(fields: ConfigFile, layers: int, head_dim: int) -> tuple[float, ...]:
    width = fields.number("query_pre_attn_scalar", head_dim)
    scale = width**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx")
    return tuple(scale / (layer + 1) if by_layer else scale for layer in range(layers))


def _mixtures(fields: ConfigFile, family: Family, hidden: int, layers: int) -> list[MixtureSpec | None]:
    """Return the experts of each layer; None for a layer that has an MLP."""
    if not family.experts:
        return [None] * layers
    key = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    chosen, step = fields.count("num_experts_per_tok"), fields.count("decoder_sparse_step", 1)
    dense = fields.layer_numbers("mlp_only_layers", layers)
    width = fields.count("moe_intermediate_size", fields.count("intermediate_size"))
    mixture = MixtureSpec(hidden, width, fields.count(key), chosen, fields.flag("norm_topk_prob"))
    if chosen > mixture.count:
        raise fields.wrong("num_experts_per_tok", f"must be at most {key} ({mixture.count})")
    return [None if layer in dense or (layer + 1) % step else mixture for layer in range(layers)]
