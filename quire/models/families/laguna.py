"""Laguna: softplus gates of attention's output, and a rotary embedding for each kind of layer."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import experts_in_place_of_mlps
from quire.models.layer_spec import GateSpec, LayerSpec, MixtureSpec, QKNormSpec, with_parts

_GATES = {True: True, "per-head": True, "per-element": False}
"""Whether one number gates a head, by the values of `gating`."""


def _gated(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    gating = fields.get("gating", True)
    if gating not in _GATES:
        raise fields.wrong("gating", "is not supported: served are true, per-head, per-element")
    heads = _heads(fields, number, layer.mixer.heads)
    return with_parts(layer, mixer={"heads": heads, "gate": GateSpec("softplus", by_head=_GATES[gating])})


def _heads(fields: ConfigFile, number: int, usual: int) -> int:
    """Return the number of query heads of a layer."""
    key = "num_attention_heads_per_layer"
    of_layers = fields.get(key)
    if of_layers is None:
        return usual
    if not isinstance(of_layers, list) or len(of_layers) != fields.count("num_hidden_layers"):
        raise fields.wrong(key, "must have a number for each layer")
    return int(fields.positive(key, of_layers[number]))


def _capped(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    cap = fields.get("moe_router_logit_softcapping")
    if not isinstance(layer.mlp, MixtureSpec) or not cap:
        return layer
    routing = replace(layer.mlp.routing, cap=fields.positive("moe_router_logit_softcapping", cap))
    return replace(layer, mlp=replace(layer.mlp, routing=routing))


FAMILIES: dict[str, Family] = {
    "LagunaForCausalLM": Family(
        windows="by type",
        local_rope=True,
        partial_rotary=True,
        modules=ModuleNames(
            gate="self_attn.g_proj",
            correction="mlp.experts.e_score_correction_bias",
            shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            shared_down="mlp.shared_expert.down_proj",
            others=((".mlp.shared_experts.", ".mlp.shared_expert."), (".mlp.gate.e_score", ".mlp.experts.e_score")),
        ),
        mixer={"qk_norm": QKNormSpec()},
        names={"routed_scaling_factor": "moe_routed_scaling_factor"},
        only={"moe_apply_router_weight_on_input": (False,)},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 512,
            "sliding_window_pattern": 1,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            },
        },
        read_layer=in_turn(
            _gated, experts_in_place_of_mlps(scoring="sigmoid", correction=True, renormalise=True), _capped
        ),
    ),
}
