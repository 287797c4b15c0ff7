"""MiMo-V2: more KV heads and sinks in layers with a window, and values that are narrower than keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import SIGMOID, experts_in_place_of_mlps
from quire.models.layer_spec import AttentionSpec, LayerSpec
from quire.models.rope_spec import read_rope

_NAME = "MiMoV2FlashForCausalLM"


def _attention(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with narrow values, and with a window and what belongs to it where the file says so."""
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec)
    if number == 0 and fields.get("layer_types") is None:
        mixer = replace(mixer, window=None, rope=read_rope(fields, FAMILIES[_NAME], mixer.head_dim))
    if mixer.window is not None and fields.get("sliding_window_size") is not None:  # without the token itself
        mixer = replace(mixer, window=fields.count("sliding_window_size") + 1)
    value_dim, scale = fields.count("v_head_dim"), fields.get("attention_value_scale", 1.0)
    if value_dim > mixer.head_dim:
        raise fields.wrong("v_head_dim", f"must be at most head_dim ({mixer.head_dim})")
    heads = mixer.kv_heads if mixer.window is None else 2 * mixer.kv_heads
    if mixer.heads % heads:
        raise fields.wrong("num_key_value_heads", f"twice must divide num_attention_heads ({mixer.heads})")
    values: dict[str, Any] = {"value_dim": value_dim, "value_scale": fields.positive("attention_value_scale", scale)}
    sinks = mixer.window is not None
    return replace(layer, mixer=replace(mixer, kv_heads=heads, sinks=sinks, out_bias=False, **values))


def _first(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer, which has no experts if it is the first one and the file does not say more."""
    if number or fields.get("mlp_layer_types") is not None:
        return _EXPERTS(fields, layer, number)
    return layer


_EXPERTS = experts_in_place_of_mlps(**SIGMOID)
FAMILIES: dict[str, Family] = {
    _NAME: Family(
        windows="by type",
        local_rope=True,
        partial_rotary=True,
        modules=ModuleNames(
            sinks="self_attn.attention_sink_bias",
            others=((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
        ),
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "attention_value_scale": 0.707,
            "sliding_window": 129,
            "sliding_window_pattern": 6,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
            },
        },
        names={"num_experts": "n_routed_experts"},
        read_layer=in_turn(_attention, _first),
    ),
}
