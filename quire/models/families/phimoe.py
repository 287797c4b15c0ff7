"""Phi 3.5-MoE: Llama with layer norms, and experts that SparseMixer routes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import experts_in_place_of_mlps
from quire.models.layer_spec import LayerSpec, with_parts
from quire.models.rope_spec import LongScaling

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


def _experts(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    margin = fields.number("router_jitter_noise", 0.01)
    return experts_in_place_of_mlps(scoring="sparsemixer", margin=margin)(fields, layer, number)


def _scaled_angles(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with angles scaled as `short_mscale` and `long_mscale` say."""
    rope, values = layer.mixer.rope, fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope is None or not isinstance(rope.scaling, LongScaling):
        return layer
    short, long = (fields.positive("rope_scaling", values.get(key), key) for key in ("short_mscale", "long_mscale"))
    if short != long:
        raise fields.wrong("rope_scaling", "is not supported: short_mscale and long_mscale differ")
    return with_parts(layer, mixer={"rope": replace(rope, scaling=replace(rope.scaling, attention_factor=short))})


def _head_bias(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, head_bias=fields.flag("lm_head_bias"))


FAMILIES: dict[str, Family] = {
    "PhimoeForCausalLM": Family(
        windows="all",
        norms={"kind": "layer", "bias": True},
        modules=ModuleNames(
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            expert=("w1", "w3", "w2"),
            others=((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe.")),
        ),
        defaults={
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
        only={"num_experts_per_tok": (2,)},
        read_layer=in_turn(_scaled_angles, _experts),
        read_model=_head_bias,
    ),
}
