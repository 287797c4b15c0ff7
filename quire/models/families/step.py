"""Step 3.5 and the text model of 3.7: more heads in layers with a window, gates by head, and limited activations."""

from __future__ import annotations

from dataclasses import replace

from quire.compute.kernels.activations import Activation
from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import has_experts, read_mixture
from quire.models.layer_spec import GateSpec, LayerSpec, MlpSpec, QKNormSpec, SharedExpert, with_parts

_DENSE = 3
"""Number of layers that have no experts, where the file does not name those that have."""


def _attention(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with the heads of its kind."""
    if layer.mixer.window is None:
        return layer
    key, own = "attention_other_setting", fields.get("attention_other_setting", {})
    if not isinstance(own, dict):
        raise fields.wrong(key, "must be an object")
    same = {"num_attention_groups": layer.mixer.kv_heads, "head_dim": layer.mixer.head_dim}
    if any(own.get(each, value) != value for each, value in same.items()):
        raise fields.wrong(key, f"is not supported: served are {same}")
    heads = own.get("num_attention_heads", layer.mixer.heads)
    heads = fields.count("num_sliding_attention_heads", int(fields.positive(key, heads, "num_attention_heads")))
    return with_parts(layer, mixer={"heads": heads})


def _experts(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    mlp = layer.mlp
    assert isinstance(mlp, MlpSpec)
    shared = _limit(fields, "swiglu_limits_shared", number)
    if not _is_sparse(fields, number):
        return replace(layer, mlp=replace(mlp, limit=shared))
    routing = {"scoring": "sigmoid", "correction": True, "renormalise": True}
    mixture = replace(
        read_mixture(fields, mlp, routing), activation=Activation(limit=_limit(fields, "swiglu_limits", number))
    )
    width = fields.count("shared_expert_intermediate_size")
    return replace(layer, mlp=replace(mixture, shared=SharedExpert(replace(mlp, width=width, limit=shared))))


def _is_sparse(fields: ConfigFile, number: int) -> bool:
    listed = fields.get("moe_layers_enum")
    if fields.get("mlp_layer_types") is not None:
        return has_experts(fields, number)
    if listed is None:
        return number >= _DENSE
    names = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(names, list) or not all(str(name).strip().isdigit() for name in names):
        raise fields.wrong("moe_layers_enum", "must be numbers of layers")
    return number in map(int, names)


def _limit(fields: ConfigFile, key: str, number: int) -> float | None:
    """Return the limit of a layer's activations; 0 and null stand for none."""
    limits = fields.get(key) or []
    if not isinstance(limits, list) or (limits and len(limits) <= number):
        raise fields.wrong(key, "must have a number for each layer")
    return fields.positive(key, limits[number]) if limits and limits[number] else None


FAMILIES: dict[str, Family] = {
    "Step3p5ForCausalLM": Family(
        windows="by type",
        local_rope=True,
        partial_rotary=True,
        modules=ModuleNames(
            gate="self_attn.g_proj",
            others=(
                (".moe.gate.weight", ".mlp.gate.weight"),
                (".moe.router_bias", ".mlp.gate.e_score_correction_bias"),
                (".moe.gate_proj.weight", ".mlp.experts.gate_proj"),
                (".moe.up_proj.weight", ".mlp.experts.up_proj"),
                (".moe.down_proj.weight", ".mlp.experts.down_proj"),
                (".share_expert.", ".mlp.shared_experts."),
            ),
        ),
        mixer={"qk_norm": QKNormSpec(), "gate": GateSpec("sigmoid", by_head=True)},
        norms={"unit_offset": True},
        names={
            "num_key_value_heads": ("num_attention_groups", "num_key_value_heads"),
            "num_local_experts": ("n_routed_experts", "moe_num_experts", "num_local_experts"),
            "num_experts_per_tok": ("moe_top_k", "num_experts_per_tok"),
            "routed_scaling_factor": "moe_router_scaling_factor",
            "shared_expert_intermediate_size": ("share_expert_dim", "share_expert_dims"),
        },
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window_pattern": 1,
            "num_local_experts": 288,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "shared_expert_intermediate_size": 1280,
            "max_position_embeddings": 128000,
        },
        only={
            "gating": (True, "per-head"),
            "use_head_wise_attn_gate": (True,),
            "moe_router_activation": ("sigmoid",),
            "norm_expert_weight": (True,),
            "use_moe_router_bias": (True,),
        },
        activations=("silu",),
        read_layer=in_turn(_attention, _experts),
    ),
}
