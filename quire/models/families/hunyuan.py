"""Hunyuan 1: queries and keys are normed behind the rotation, whose base grows by a fixed factor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import experts_in_place_of_mlps
from quire.models.layer_spec import LayerSpec, QKNormSpec, with_parts
from quire.models.rope_spec import DynamicScaling


def with_grown_base(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with a base of theta · alpha^(d / (d - 2)) if its `dynamic` scaling has an `alpha`.

    Such a scaling does not depend on the sequence's length.
    """
    rope, width = layer.mixer.rope, layer.mixer.head_dim
    values = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope is None or not isinstance(rope.scaling, DynamicScaling) or not values.get("alpha"):
        return layer
    alpha = fields.positive("rope_scaling", values["alpha"], "alpha")
    grown = replace(rope, theta=rope.theta * alpha ** (width / (width - 2)), scaling=None)
    return with_parts(layer, mixer={"rope": grown})


_DENSE: dict[str, Any] = {
    "modules": ModuleNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"),
    "mixer": {"qk_norm": QKNormSpec(behind_rope=True)},
}
FAMILIES: dict[str, Family] = {
    "HunYuanDenseV1ForCausalLM": Family(**_DENSE, defaults={"rms_norm_eps": 1e-5}, read_layer=with_grown_base),
    "HunYuanMoEV1ForCausalLM": Family(
        modules=replace(
            _DENSE["modules"],
            router="mlp.gate.wg",
            shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
            shared_down="mlp.shared_mlp.down_proj",
        ),
        mixer=_DENSE["mixer"],
        only={"use_cla": (False,), "use_qk_norm": (True,)},
        names={"num_experts_per_tok": "moe_topk", "moe_intermediate_size": "intermediate_size"},
        defaults={"rms_norm_eps": 1e-5, "num_experts": 1, "num_experts_per_tok": 1, "num_shared_experts": 1},
        read_layer=in_turn(with_grown_base, experts_in_place_of_mlps(renormalise=True, fp32="weight")),
    ),
}
