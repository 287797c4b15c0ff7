"""Gemma 4: heads of other widths in layers that see everything, normed values, and layers that read another's cache.

The sizes for devices have vectors of each token beside the stream; one size has experts beside an MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.compute.kernels.activations import Activation
from quire.compute.kernels.routing import Routing
from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.gemma import AROUND
from quire.models.kv_cache_groups import read_windowed_layers
from quire.models.layer_spec import (
    AttentionSpec,
    LayerInputSpec,
    LayerSpec,
    MixtureSpec,
    MlpSpec,
    QKNormSpec,
    SharedExpert,
)
from quire.models.rope_spec import read_rope

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

_OF_LAYERS = ("head_dim", "num_key_value_heads")


def _layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    layers, mixer, mlp = fields.count("num_hidden_layers"), layer.mixer, layer.mlp
    assert isinstance(mixer, AttentionSpec) and isinstance(mlp, MlpSpec)
    sources, norms = cache_sources(fields, (*read_windowed_layers(fields, _GEMMA4, layers)[:-1], False)), 4
    if number == layers - 1:  # it sees everything, whatever the file says
        mixer = replace(mixer, window=None, rope=read_rope(fields, _GEMMA4, mixer.head_dim))
    mixer = replace(_of_kind(fields, mixer, number), source=sources[number])
    if sources[number] is not None and fields.flag("use_double_wide_mlp"):
        mlp = replace(mlp, width=2 * mlp.width)
    width = fields.natural("hidden_size_per_layer_input", 0)
    of_input = LayerInputSpec(mlp.hidden, width, mlp.activation) if width else None
    norms += of_input is not None
    mixture = None
    if fields.flag("enable_moe_block"):
        mixture, norms = _mixture(fields, mlp), norms + 3
    norm = replace(layer.norms, number=norms)
    return replace(layer, mixer=mixer, mlp=mixture or mlp, norms=norm, input=of_input, scaled=True)


def _of_kind(fields: ConfigFile, mixer: AttentionSpec, number: int) -> AttentionSpec:
    """Return attention with the widths of its kind of layer, which transformers 5 writes layer by layer."""
    is_full, keys_are_values = mixer.window is None, fields.flag("attention_k_eq_v")
    if is_full and keys_are_values:
        mixer = replace(mixer, values="keys")
    of_layers = fields.get("per_layer_config")
    if of_layers is not None:
        own = _of_layer(fields, of_layers, number)
        head_dim, kv_heads = (own.get(key) for key in _OF_LAYERS)
    elif is_full:
        head_dim = fields.count("global_head_dim", 512)
        kv_heads = fields.get("num_global_key_value_heads") if keys_are_values else None
    else:
        head_dim = kv_heads = None
    sizes = ((mixer.head_dim, head_dim), (mixer.kv_heads, kv_heads))
    widths = [usual if each is None else int(fields.positive("per_layer_config", each)) for usual, each in sizes]
    return replace(mixer, head_dim=widths[0], kv_heads=widths[1])


def _of_layer(fields: ConfigFile, of_layers: object, number: int) -> dict[str, Any]:
    """Return what differs in a layer; transformers may write its number with zeros before it."""
    known = isinstance(of_layers, dict) and all(
        str(key).isdigit() and isinstance(own, dict) and set(own) <= set(_OF_LAYERS) for key, own in of_layers.items()
    )
    if not isinstance(of_layers, dict) or not known:
        raise fields.wrong("per_layer_config", f"is not supported: served are {', '.join(_OF_LAYERS)} by layer")
    by_number: dict[int, dict[str, Any]] = {int(key): own for key, own in of_layers.items()}
    return by_number.get(number, {})


def cache_sources(fields: ConfigFile, windowed: tuple[bool, ...]) -> list[int | None]:
    """Return for each layer the one whose cache it reads: of its kind, the last that has one; None: its own.

    Args:
        windowed: Whether each layer has a window.

    Raises:
        CheckpointError: A layer would find none.
    """
    first = len(windowed) - fields.natural("num_kv_shared_layers", 0)
    lasts = {kind: number for number, kind in enumerate(windowed[: max(0, first)])}
    if first < len(windowed) and lasts.keys() != set(windowed):
        raise fields.wrong("num_kv_shared_layers", "leaves no layer of a kind whose keys and values others could read")
    return [lasts[kind] if number >= first else None for number, kind in enumerate(windowed)]


def _mixture(fields: ConfigFile, mlp: MlpSpec) -> MixtureSpec:
    """Return the experts, with the MLP that stands beside them."""
    count, chosen = fields.count("num_experts"), fields.count("top_k_experts")
    if chosen > count:
        raise fields.wrong("top_k_experts", f"must be at most num_experts ({count})")
    routing = Routing(chosen, renormalise=True, scaled=True)
    width = fields.count("moe_intermediate_size")
    activation = Activation("gelu")
    return MixtureSpec(mlp.hidden, width, count, routing, SharedExpert(mlp), activation, router_norm=True)


def _model(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    vocab = fields.count("vocab_size_per_layer_input", 262144) if spec.layer_input_width else 0
    return replace(spec, embedding_scale=spec.hidden**0.5, layer_input_vocab=vocab)


_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_GEMMA4 = Family(
    decoder="quire.models.gemma4:Gemma4",
    modules=ModuleNames(
        norms=AROUND,
        router="router.proj",
        expert_factors="router.per_expert_scale",
        experts="experts",
        shared_down="mlp.down_proj",
    ),
    names={"hidden_act": "hidden_activation"},
    defaults=_DEFAULTS,
    windows="by type",
    local_rope=True,
    mixer={"scale": 1.0, "qk_norm": QKNormSpec(), "values": "normed"},
    norms={"number": 4, "place": "around"},
    only={"use_bidirectional_attention": ("vision",)},
    read_layer=_layer,
    read_model=_model,
    overflows_float16=True,
)
_UNIFIED = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144}
FAMILIES: dict[str, Family] = {
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForCausalLM": replace(_GEMMA4, defaults=_DEFAULTS | _UNIFIED),
}
