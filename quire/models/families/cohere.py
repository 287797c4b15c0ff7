"""Command R and Command A: attention and MLP in parallel, layer norms without biases, and scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import interleaved
from quire.models.layer_spec import LayerSpec, QKNormSpec, with_parts

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


def _normed(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    norm = QKNormSpec("layer", weights="by head") if fields.flag("use_qk_norm") else None
    return with_parts(interleaved(fields, layer, number), mixer={"qk_norm": norm})


def _rotated_in_windows(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    if layer.mixer.window is None:
        return with_parts(layer, mixer={"rope": None})
    return interleaved(fields, layer, number)


def _scaled_logits(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, logit_scale=fields.number("logit_scale", 0.0625))


_COHERE: dict[str, Any] = {
    "modules": ModuleNames(norms=("input_layernorm",)),
    "names": {"rms_norm_eps": "layer_norm_eps"},
    "norms": {"kind": "layer", "number": 1, "place": "parallel"},
    "read_model": _scaled_logits,
}
_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True}
FAMILIES: dict[str, Family] = {
    "CohereForCausalLM": Family(**_COHERE, defaults=_DEFAULTS | {"rope_theta": 500000.0}, read_layer=_normed),
    "Cohere2ForCausalLM": Family(
        **_COHERE,
        windows="by type",
        defaults=_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4},
        read_layer=_rotated_in_windows,
    ),
}
