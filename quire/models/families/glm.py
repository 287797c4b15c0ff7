"""GLM-4: half of each head is rotated, in interleaved pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import interleaved

_MODULES = ModuleNames(up=("mlp.gate_up_proj",))
_GLM: dict[str, Any] = {
    "partial_rotary": True,
    "mixer": {"out_bias": False},
    "defaults": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "max_position_embeddings": 131072,
    },
    "read_layer": interleaved,
}
FAMILIES: dict[str, Family] = {
    "GlmForCausalLM": Family(**_GLM, modules=_MODULES),
    "Glm4ForCausalLM": Family(
        **_GLM,
        modules=replace(
            _MODULES,
            norms=(
                "input_layernorm",
                "post_self_attn_layernorm",
                "post_attention_layernorm",
                "post_mlp_layernorm",
            ),
        ),
        norms={"number": 4, "place": "around"},
    ),
}
