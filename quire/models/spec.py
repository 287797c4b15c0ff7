"""Reads what a model is from a Hugging Face config.json of transformers 4 or 5, into frozen plain data.

Everything that would change the arithmetic and is not served is refused here, by name. Does not import torch, so that
processes without a device read it too. Knows nothing about weights, tokenizers or memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import CheckpointError
from quire.foundation.config.cache import element_bytes
from quire.foundation.config.model import ModelConfig, ModelImpl
from quire.models.audio.audio_spec import SpeechSpec
from quire.models.audio.hearing import read_hearing
from quire.models.audio.hearing_spec import HearingSpec
from quire.models.config_file import ConfigFile
from quire.models.fallback.description import Description
from quire.models.fallback.spec import DEFAULT_MAX_MODEL_LEN, FAMILY, WHOLE, describe, layers_of
from quire.models.families.family import Family
from quire.models.families.layers import read_layers
from quire.models.families.registry import ALIASES, FAMILIES, FLAT, HEADS, NATIVE, POOLED, SPEECH, TEXT_MODELS, WRAPPERS
from quire.models.head_spec import HeadSpec, read_head
from quire.models.kv_cache_groups import kv_groups
from quire.models.layer_spec import AttentionSpec, LayerSpec, Mixer, MixtureSpec, NormSpec
from quire.models.pooler_config import GENERATES_ONLY, PoolerSpec, with_pooler
from quire.models.quantization.formats import Format, GgufFormat, Quantization
from quire.models.quantization.held_bytes import HeldWeights, expected_weights, held_in
from quire.models.quantization.parsers import read_quantization
from quire.models.rope_spec import RopeSpec
from quire.models.stateful_spec import Stateful
from quire.models.text_head_spec import TextHead, read_labels, read_problem
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.modules import warn_once
from quire.models.vision.vision_spec import ClipSpec, VisionSpec, read_vision
from quire.models.weights.safetensors_files import has_own_head
from quire.scheduling.kvcache.cache_groups import CacheGroup, block_elements, block_entries, block_parts
from quire.scheduling.kvcache.rope_length_mode import RopeLengthMode

if TYPE_CHECKING:
    from quire.models.mtp_spec import MtpSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by config.json's names of dtypes."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: its layers, and what comes before and after them.

    Attributes:
        architecture: A key of NATIVE.
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
        tp: Number of parts that layers are divided into, in a rank's share of the model (rank_spec.py).
        tables: Number of tables of the vocabulary's size (the embedding, and an untied head); None: `tie_embeddings`
            decides.
        groups: KV groups of a share that has some of the layers: the whole model's groups with these layers only. None:
            the layers decide.
        head: The properties of a draft head; None: this is a model, not a draft head.
        fallback: How transformers' modules compute the model; None: Quire's own layers do.
        generates: Whether the model has logits of the next token; otherwise, it makes vectors or values of texts.
        token_types: Number of token types, whose embeddings are added to the tokens'; 0: there are none.
        embedding_width: Width of the embeddings, if a projection makes states of them; 0: as wide as the stream.
        text_head: The head that makes values of texts; None: there is none.
        pooler: How vectors and values are made of texts, if `spec_of` has read it.
        untied: Whether config.json ties the head to the embedding, but the files have two that differ.
        layer_input_vocab: Number of tokens that have vectors of their own for layers (`LayerSpec.input`).
        mtp_layers: The numbers of layers that predict several tokens (DeepSeek-V3, section 2.2), which are not served.
        vision: The tower for images, if `spec_of` has read it; None: the model reads text alone.
        length_limit: What limits `max_model_len`, if it is less than the model was made for.
        has_tower: Whether this share of the model has the tower, as a pipeline's first stage does.
        speech: The encoder of sounds whose states the layers attend to; None: there is none.
        hearing: The tower for sounds among the tokens, if `spec_of` has read it; None: the model hears nothing.
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
    groups: tuple[CacheGroup, ...] | None = None
    head: HeadSpec | MtpSpec | None = None
    untied: bool = False
    position_offset: int = 0
    embedding_scale: float | None = None
    logit_scale: float | None = None
    embedding_norm: bool = False
    head_bias: bool = False
    mtp_layers: range = range(0)
    layer_input_vocab: int = 0
    fallback: Description | None = None
    generates: bool = True
    token_types: int = 0
    embedding_width: int = 0
    text_head: TextHead | None = None
    pooler: PoolerSpec = GENERATES_ONLY
    vision: VisionSpec | None = None
    length_limit: str = ""
    has_tower: bool = True
    speech: SpeechSpec | None = None
    hearing: HearingSpec | None = None

    @property
    def attention(self) -> Mixer:
        """Attention of the first layer that caches anything of tokens, or the first layer's mixer if none does.
        Other layers' heads may differ.
        """
        mixers = [layer.mixer for layer in self.layers]
        return next((mixer for mixer in mixers if mixer.form.planes), mixers[0])

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that keep a state of each sequence."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.mixer.state_form())

    @property
    def on_cpus_alone(self) -> bool:
        """Whether GPUs lack the kernels of a layer: of one that keeps states, or has experts without gates."""
        mixers, mlps = ([getattr(layer, part) for layer in self.layers] for part in ("mixer", "mlp"))
        return any(isinstance(mixer, Stateful) and not mixer.on_a_gpu for mixer in mixers) or any(
            isinstance(mlp, MixtureSpec) and mlp.activation.products == 1 for mlp in mlps
        )

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of one sequence's state, in all layers. `dtype` is config.json's name of the model's."""
        planes = [plane for layer in self.layers for plane in layer.mixer.state_form()]
        return sum(plane.elements * DTYPE_BYTES[plane.element or dtype] for plane in planes)

    def source_bytes(self, dtype: str) -> int:
        """Return the bytes of what all layers cache of an encoder's states for one sequence; 0: there is no encoder."""
        elements = sum(layer.cross.cached_elements for layer in self.layers if layer.cross is not None)
        return elements * DTYPE_BYTES[dtype]

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
    def towers(self) -> tuple[VisionSpec | HearingSpec, ...]:
        """The towers for images and for sounds."""
        return tuple(tower for tower in (self.vision, self.hearing) if tower is not None)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary embeddings that layers have, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.mixer.rope for layer in self.layers if layer.mixer.rope is not None))

    @property
    def shifts_positions(self) -> bool:
        """Whether images take fewer positions than they have tokens (M-RoPE)."""
        if self.fallback is not None:
            return self.vision is not None and not isinstance(self.vision, ClipSpec) and bool(self.vision.merge)
        return self.vision is not None and any(rope.sections for rope in self.ropes)

    @property
    def rope_length_mode(self) -> RopeLengthMode | None:
        """How the rotation of keys depends on the sequence's length; None: it does not."""
        return next((rope.length_mode for rope in self.ropes if rope.length_mode is not None), None)

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        if self.fallback is not None:
            return self.fallback.parameters
        h, head, width = self.hidden, self.head, self.embedding_width or self.hidden
        tables = (1 if self.tie_embeddings else 2) if self.tables is None else self.tables
        around = -(-self.vocab_size // self.tp) * (width * tables + self.head_bias)
        around += self.learned_positions * (self.max_model_len + self.position_offset) * width
        around += self.token_types * width + bool(self.embedding_width) * (width + 1) * h
        if head is not None:
            around = head.weights(self.vocab_size, h)
        around += sum(self.norm.weights(width)) * self.embedding_norm
        around += sum(self.norm.weights(h)) * bool(self.family.modules.norm)
        if (width := self.layer_input_width) and self.layers[0].input is not None:
            around += -(-self.layer_input_vocab // self.tp) * width + width * h + self.layers[0].input.width
        if (streams := self.layers[0].streams) is not None:
            around += 2 * (streams.count - 1) * h * h
        if self.text_head is not None:
            around += self.text_head.weights(h, sum(self.norm.weights(1)))
        return around + sum(sum(layer.weights()) for layer in self._stored_layers)

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of all weights, quantized ones and the ones kept in `dtype`."""
        held = self.held
        if held is None:
            held = expected_weights(self.num_parameters, self._quantized_weights(), self.hidden)
        return held.dense * DTYPE_BYTES[dtype] + held.fixed

    def _quantized_weights(self) -> Mapping[Format, int]:
        """Return how many weights have each format, by the names that modules have in a checkpoint."""
        counts: Counter[Format] = Counter()
        if self.quantization is not None:
            for number, layer in enumerate(self.layers):
                for name, weights in self.family.modules.projections(layer):
                    form = self.quantization.format_of(f"{self.layer_name(number)}.{name}")
                    if form is not None:
                        counts[form] += weights
        return counts

    @property
    def unread(self) -> tuple[str, ...]:
        """Beginnings of names of tensors that are not read with the layers: the family's, keys and values of layers
        that read another layer's, and those of an encoder's states.
        """
        modules, in_layers = self.family.modules, []
        for number, layer in enumerate(self.layers):
            names = modules.unread_in_layers
            if layer.mixer.source is not None:
                names = (*names, *modules.qkv[1:], modules.key_norm, "self_attn.v_norm")
            if layer.cross is not None:
                names = (*names, *modules.cross_qkv[1:])
            in_layers += [f"{self.layer_name(number)}.{name}" for name in names]
        return (*modules.unread, *in_layers)

    @property
    def layer_input_width(self) -> int:
        """Width of all layers' inputs of a token beside the stream; 0: they have none."""
        return sum(layer.input.width for layer in self.layers if layer.input is not None)

    @property
    def looked_up_weights(self) -> int:
        """Number of this rank's weights in tables that are only looked up, row by row."""
        table = 0 if self.tie_embeddings else -(-self.vocab_size // self.tp) * self.hidden
        return table + -(-self.layer_input_vocab // self.tp) * self.layer_input_width

    @property
    def linear_weights(self) -> int:
        """Number of weights in projections, without biases, the head and routers."""
        return sum(layer.weights().linear for layer in self._stored_layers)

    @property
    def _stored_layers(self) -> Iterable[LayerSpec]:
        """The layers, of which those that share their weights count once."""
        return {self.layer_name(number): layer for number, layer in enumerate(self.layers)}.values()

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the bytes that all layers cache of one token. `kv_dtype` is a type of `config/cache.py`."""
        layers = range(len(self.layers))
        kept = [group.layers[:1] for group in self.kv_groups()] if self.two_sided else [layers]
        elements = sum(self.layers[layer].mixer.form.elements for each in kept for layer in each)
        return elements * element_bytes(kv_dtype, DTYPE_BYTES)

    def kv_block_bytes(self, kv_dtype: str, block_size: int) -> int:
        """Return the bytes of one block: what the layers of one group cache of `block_size` tokens, and padding."""
        groups = self.kv_groups()
        elements = groups[0].form.elements if self.two_sided else block_elements(groups)
        return block_size * elements * element_bytes(kv_dtype, DTYPE_BYTES)

    @property
    def block_parts(self) -> tuple[int, ...]:
        """For each KV group, the number of parts into which its layers divide a block: equally many in all groups if
        all layers cache equally much, or one if layers write over one another's keys and values.
        """
        groups = self.kv_groups()
        return (1,) * len(groups) if self.two_sided else block_parts(groups)

    @property
    def block_entries(self) -> tuple[int, ...]:
        """For each KV group, the entries of its layers' planes that a block has; 1 if all layers cache alike."""
        groups = self.kv_groups()
        return (1,) * len(groups) if self.two_sided else block_entries(groups)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The layers' mixers, in order."""
        return tuple(layer.mixer for layer in self.layers)

    @property
    def sources(self) -> tuple[int, ...]:
        """For each layer, the layer whose keys and values it reads; most read their own."""
        sources = (layer.mixer.source for layer in self.layers)
        return tuple(own if source is None else source for own, source in enumerate(sources))

    @property
    def two_sided(self) -> bool:
        """Whether tokens see the tokens behind them, in all layers, so that whole texts are computed in one step."""
        return self.attention.two_sided

    @property
    def keeps_own_cache(self) -> bool:
        """Whether the model keeps keys and values by itself, so that blocks only count what sequences hold."""
        return self.fallback is not None and self.fallback.tier != "paged"

    def kv_groups(self) -> tuple[CacheGroup, ...]:
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
    family = NATIVE[architecture]
    fields.adopt(family.names, family.defaults)
    _refuse_what_changes_the_arithmetic(fields, family)
    hidden, layers = fields.count("hidden_size"), read_layers(fields, family)
    rotated = [layer.mixer for layer in layers if layer.mixer.rope is not None]
    rope = next((each.rope for each in rotated if each.reach.length is None), rotated[0].rope if rotated else None)
    max_len = fields.count("max_position_embeddings", 2048)
    quantized = read_quantization(fields.get("quantization_config"), quantization)
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
        quantization=quantized.renamed(family.modules.older) if quantized else None,
        head=read_head(fields, Path(directory), hidden) if is_head else None,
        generates=not layers[0].mixer.two_sided,
        mtp_layers=range(len(layers), len(layers) + fields.natural("num_nextn_predict_layers", 0)),
    )
    if family.read_model is not None:
        spec = family.read_model(fields, spec)
    if not spec.generates:
        spec = replace(spec, tie_embeddings=True, untied=False)
    if spec.quantization:
        spec = replace(spec, held=held_in(Path(directory), spec.quantization, spec.tie_embeddings, spec.mtp_layers))
    return spec


def spec_of(model: ModelConfig, directory: Path | None = None) -> ModelSpec:
    """Read the spec of a model as `read_spec` does, with what --runner and its like say.

    Args:
        model: The settings of the model.
        directory: The directory of its files; None: settings are resolved, so `model.model` is the directory.

    Raises:
        CheckpointError, ConfigError: From `read_spec` and `with_pooler`.
    """
    found = directory or Path(model.model)
    spec = read_spec(found, model.quantization, model.model_impl)
    if spec.head is not None:
        return spec
    if spec.generates and not model.language_model_only:
        spec = replace(spec, vision=_vision(spec, found), hearing=read_hearing(found))
    return with_pooler(spec, found, model)


def _vision(spec: ModelSpec, directory: Path) -> VisionSpec | None:
    """Return the model's tower; None: it has none, or its text model cannot take what the tower makes.

    Raises:
        CheckpointError: From `read_vision`, or the text model's positions do not tell rows and columns.
    """
    vision = read_vision(directory)
    if vision is None or isinstance(vision, ClipSpec):
        return vision
    deep = isinstance(vision, ModuleVisionSpec) and vision.deep
    two_sided = isinstance(vision, ModuleVisionSpec) and vision.two_sided
    if spec.fallback is not None and spec.keeps_own_cache and (deep or two_sided):
        why = "vectors for layers (DeepStack)" if deep else "what lies behind"
        warn_once(directory, f"transformers' modules are not given {why}")
        return None
    attentions = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    windows = [each.window for each in attentions if each.window is not None]
    if isinstance(vision, ModuleVisionSpec) and two_sided and min(windows, default=2**31) < vision.longest:
        warn_once(directory, f"the {vision.longest} tokens of an image, which see one another, are more than a window")
        return None
    if spec.fallback is None and vision.merge and not any(rope.sections for rope in spec.ropes):
        raise CheckpointError(
            f"{directory}: rope_parameters has no mrope_section, by which positions tell rows and columns of images: "
            "download config.json again, or give --language-model-only."
        )
    return vision


def _is_native(fields: ConfigFile) -> bool:
    names, name, inner = fields.get("architectures", []), _native_name(fields), fields.get("text_config")
    if name in WRAPPERS and isinstance(inner, dict) and "model_type" in inner:
        return inner["model_type"] in TEXT_MODELS
    return not isinstance(names, list) or not names or name is not None


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
    layers, is_whole, head = layers_of(found), found.tier == "whole", None
    if found.values_of:
        head = TextHead((), "all" if found.values_of == "tokens" else "cls", read_labels(fields), read_problem(fields))
    return ModelSpec(
        architecture=found.architecture,
        family=WHOLE if is_whole else FAMILY,
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
        generates=not is_whole,
        token_types=found.token_types,
        text_head=head,
    )


def on_a_gpu(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the sizes of weights on a GPU, which keeps a GGUF file's weights in other forms."""
    form = spec.quantization.rules[0].format if spec.quantization else None
    return replace(spec, held=HeldWeights(form.gpu_dense, form.coded)) if isinstance(form, GgufFormat) else spec


def _architecture(fields: ConfigFile) -> str:
    """Return the architecture that is computed; for a model that also reads images, it is the text model's."""
    name = _native_name(fields)
    if name is None:
        raise fields.wrong(
            "architectures", f"is not supported: served are {', '.join((*FAMILIES, *POOLED, *SPEECH, *WRAPPERS))}"
        )
    if name in FLAT and fields.get("text_config") is None:
        return FLAT[name]
    return _text_architecture(fields) if name in WRAPPERS else name


def _native_name(fields: ConfigFile) -> str | None:
    """Return the first of the architectures that Quire's own layers serve; None: they serve none of them."""
    names = fields.get("architectures", [])
    known = (ALIASES.get(name, name) for name in names if isinstance(name, str)) if isinstance(names, list) else ()
    return next((name for name in known if name in NATIVE or name in WRAPPERS), None)


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
    "llama_4_scaling": (),  # Mistral Large 3's; others have it in rope_parameters
}
"""Keys of config.json that are refused in every family unless they are absent or have one of these values."""


def _refuse_what_changes_the_arithmetic(fields: ConfigFile, family: Family) -> None:
    """Refuse keys that change the arithmetic, unless they have values that are served."""
    for key, values in {**_ONLY, **family.only}.items():
        if fields.get(key) is not None and fields.get(key) not in values:
            raise fields.wrong(key, "is not supported")
