"""OLMo 1 to 3: from norms without weights to norms behind attention and MLP, and of whole queries and keys."""

from __future__ import annotations

from typing import Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.layer_spec import LayerSpec, QKNormSpec, with_parts


def _clipped(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    return with_parts(layer, mixer={"clip": fields.optional_number("clip_qkv")})


_BEHIND: dict[str, Any] = {
    "modules": ModuleNames(norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    "mixer": {"qk_norm": QKNormSpec(whole=True, weights="by head")},
    "norms": {"place": "behind"},
}
FAMILIES: dict[str, Family] = {
    "OlmoForCausalLM": Family(
        norms={"kind": "layer", "weight": False, "eps": 1e-5},
        read_layer=_clipped,
    ),
    "Olmo2ForCausalLM": Family(**_BEHIND, defaults={"rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Family(
        **_BEHIND,
        windows="by type",
        local_rope=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 500000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
}
