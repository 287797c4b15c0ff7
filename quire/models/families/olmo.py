"""OLMo 1 to 3, OLMoE and FlexOlmo, most of which norm whole queries and keys, or behind attention and MLP."""

from __future__ import annotations

from typing import Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.mixtures import experts_in_place_of_mlps
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
    "OlmoeForCausalLM": Family(
        mixer={"qk_norm": QKNormSpec(whole=True, weights="by head")},
        defaults={"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        only={"clip_qkv": ()},
        read_layer=experts_in_place_of_mlps(),
    ),
    "FlexOlmoForCausalLM": Family(
        **_BEHIND,
        defaults={
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 4096,
        },
        read_layer=experts_in_place_of_mlps(),
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
