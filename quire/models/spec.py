"""Reads what a model is from a Hugging Face config.json of transformers 4 or 5, into frozen plain data.

Everything that would change the arithmetic and is not served is refused here, by name. Does not import torch, so that
processes without a device read it too. Knows nothing about weights, tokenizers or memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.foundation.config.cache import element_bytes
from quire.foundation.config.model import ModelConfig, ModelImpl
from quire.models.config_file import ConfigFile
from quire.models.fallback.description import Description
from quire.models.fallback.spec import DEFAULT_MAX_MODEL_LEN, FAMILY, describe, layers_of
from quire.models.families.family import Family
from quire.models.families.layers import read_layers
from quire.models.families.registry import ALIASES, FAMILIES, HEADS, TEXT_MODELS, WRAPPERS
from quire.models.head_spec import HeadSpec, read_head
from quire.models.kv_cache_groups import kv_groups
from quire.models.layer_spec import AttentionSpec, LayerSpec, MixtureSpec, NormSpec
from quire.models.quantization.formats import GgufFormat, Quantization
from quire.models.quantization.held_bytes import HeldWeights, expected_weights, held_in
from quire.models.quantization.parsers import read_quantization
from quire.models.rope_spec import RopeSpec
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
        position_offset: The number of the first position's embedding.
        embedding_scale: The factor of the tokens' embeddings; None: 1.
        logit_scale: The factor of logits; None: 1.
        embedding_norm: Whether the tokens' embeddings are normed.
        head_bias: Whether the head has a bias.
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
        fallback: How transformers' modules compute the model; None: Quire's own layers do.
        untied: Whether config.json ties the head to the embedding, but the files have two that differ.
        mtp_layers: The numbers of layers that predict several tokens (DeepSeek-V3, section 2.2), which are not served.
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
    position_offset: int = 0
    embedding_scale: float | None = None
    logit_scale: float | None = None
    embedding_norm: bool = False
    head_bias: bool = False
    mtp_layers: range = range(0)
    fallback: Description | None = None

    @property
    def attention(self) -> AttentionSpec:
        """Attention of the first layer. All layers have equal numbers of heads of equal width; windows, scales and rope
        may differ.
        """
        return self.layers[0].mixer

    def layer_name(self, layer: int) -> str:
        """Return what the names of layer number `layer`'s modules begin with in the checkpoint."""
        return self.family.modules.layer.format(layer)

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
        if self.fallback is not None:
            return self.fallback.parameters
        h, head = self.hidden, self.head
        tables = (1 if self.tie_embeddings else 2) if self.tables is None else self.tables
        around = -(-self.vocab_size // self.tp) * (h * tables + self.head_bias)
        around += self.learned_positions * (self.max_model_len + self.position_offset) * h
        if head is not None:
            around = self.vocab_size * h * head.own_embedding + head.vocab_size * h
            around += len(head.sources_of(0)) * head.target_hidden * h
        around += sum(self.norm.weights(h)) * self.embedding_norm
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

    @property
    def keeps_own_cache(self) -> bool:
        """Whether the model keeps keys and values by itself, so that blocks only count what sequences hold."""
        return self.fallback is not None and self.fallback.tier == "own"

    def kv_groups(self) -> tuple[KVCacheGroup, ...]:
        """Return the groups of layers that share a block table."""
        return kv_groups([layer.mixer for layer in self.layers]) if self.groups is None else self.groups


def read_spec(directory: Path | str, quantization: str | None = None, impl: ModelImpl = "auto") -> ModelSpec:
    """Read `directory`/config.json.

    Args:
        quantization: The value of --quantization; None: it was not given.
        impl: The value of --model-impl.

    Raises:
        CheckpointError: The file is missing or broken, or asks for something that is not served; the message names it.
        ConfigError: --quantization is not served, or contradicts the file.
    """
    fields = ConfigFile(Path(directory) / "config.json")
    if impl == "transformers" or (impl == "auto" and not _is_native(fields)):
        return _fallback_spec(Path(directory), fields, quantization)
    architecture = _architecture(fields)
    is_head = architecture in HEADS
    family = (HEADS if is_head else FAMILIES)[architecture]
    fields.adopt(family.names, family.defaults)
    _refuse_what_changes_the_arithmetic(fields, family)
    hidden, layers = fields.count("hidden_size"), read_layers(fields, family)
    rotated = [layer.mixer for layer in layers if layer.mixer.rope is not None]
    rope = next((each.rope for each in rotated if each.window is None), rotated[0].rope if rotated else None)
    max_len = fields.count("max_position_embeddings", 2048)
    untied = not is_head and fields.flag("tie_word_embeddings") and has_own_head(Path(directory))
    spec = ModelSpec(
        architecture=architecture,
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden=hidden,
        layers=layers,
        norm=replace(layers[0].norms, number=1),
        learned_positions=bool(family.modules.positions),
        tie_embeddings=fields.flag("tie_word_embeddings") and not untied,
        untied=untied,
        dtype=fields.dtype(tuple(DTYPE_BYTES)),
        max_model_len=rope.max_len(max_len) if rope else max_len,
        bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_ids=fields.token_ids("eos_token_id"),
        logit_cap=fields.optional_number("final_logit_softcapping"),
        quantization=read_quantization(fields.get("quantization_config"), quantization),
        head=read_head(fields, Path(directory), hidden) if is_head else None,
        mtp_layers=range(len(layers), len(layers) + fields.natural("num_nextn_predict_layers", 0)),
    )
    if family.read_model is not None:
        spec = family.read_model(fields, spec)
    if spec.quantization:
        spec = replace(spec, held=held_in(Path(directory), spec.quantization, spec.tie_embeddings, spec.mtp_layers))
    return spec


def spec_of(model: ModelConfig) -> ModelSpec:
    """Read the spec of a model whose settings are resolved, as `read_spec` does."""
    return read_spec(model.model, model.quantization, model.model_impl)


def _is_native(fields: ConfigFile) -> bool:
    names = fields.get("architectures", [])
    return not isinstance(names, list) or not names or _native_name(fields) is not None


def _fallback_spec(directory: Path, fields: ConfigFile, quantization: str | None) -> ModelSpec:
    """Return the spec of a model that transformers' modules compute."""
    if quantization or fields.get("quantization_config") is not None:
        raise fields.refused(
            "quantization_config",
            "transformers' modules serve this model, and compute dense weights only: give a checkpoint that is not "
            "quantized, and leave --quantization out.",
        )
    names = fields.get("architectures", [])
    found = describe(directory, str(names[0]) if isinstance(names, list) and names else "this model")
    layers = layers_of(found)
    return ModelSpec(
        architecture=found.architecture,
        family=FAMILY,
        vocab_size=found.vocab_size,
        hidden=found.hidden,
        layers=layers,
        norm=replace(layers[0].norms, number=1),
        learned_positions=False,
        tie_embeddings=found.tied,
        dtype=fields.dtype(tuple(DTYPE_BYTES)),
        max_model_len=found.max_model_len or DEFAULT_MAX_MODEL_LEN,
        bos_id=found.bos_id,
        eos_ids=found.eos_ids,
        logit_cap=None,
        fallback=found,
    )


def on_a_gpu(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the sizes of weights on a GPU, which keeps a GGUF file's weights in other forms."""
    form = spec.quantization.rules[0].format if spec.quantization else None
    return replace(spec, held=HeldWeights(form.gpu_dense, form.coded)) if isinstance(form, GgufFormat) else spec


def _architecture(fields: ConfigFile) -> str:
    """Return the architecture that is computed; for a model that also reads images, it is the text model's."""
    name = _native_name(fields)
    if name is None:
        raise fields.wrong("architectures", f"is not supported: served are {', '.join((*FAMILIES, *WRAPPERS))}")
    return _text_architecture(fields) if name in WRAPPERS else name


def _native_name(fields: ConfigFile) -> str | None:
    """Return the first of the architectures that Quire's own layers serve; None: they serve none of them."""
    names = fields.get("architectures", [])
    known = (ALIASES.get(name, name) for name in names if isinstance(name, str)) if isinstance(names, list) else ()
    return next((name for name in known if name in FAMILIES or name in HEADS or name in WRAPPERS), None)


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


_ONLY: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
}
"""Keys of config.json that are refused in every family unless they are absent or have one of these values."""


def _refuse_what_changes_the_arithmetic(fields: ConfigFile, family: Family) -> None:
    """Refuse keys that change the arithmetic, unless they have values that are served."""
    for key, values in {**_ONLY, **family.only}.items():
        if fields.get(key) is not None and fields.get(key) not in values:
            raise fields.wrong(key, "is not supported")
