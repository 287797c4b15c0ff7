"""Families of experts that are routed by σ: dots.llm1, GLM-4.5 to 4.7, Hunyuan 3, MiniMax-M2, Solar and Trinity."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import SIGMOID, experts_in_place_of_mlps
from quire.models.layer_spec import GateSpec, LayerSpec, QKNormSpec, with_parts

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

_like_deepseek = experts_in_place_of_mlps(**SIGMOID)


def _glm4(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    norm = QKNormSpec() if fields.flag("use_qk_norm") else None
    return _like_deepseek(fields, with_parts(layer, mixer={"qk_norm": norm, "out_bias": False}), number)


_SUMMED_TO_ONE: dict[str, Any] = {"scoring": "sigmoid", "correction": True, "renormalise": True, "epsilon": 1e-20}


def _rotated_in_part(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    rope, width = layer.mixer.rope, fields.get("rotary_dim")
    if rope is None or width is None:
        return layer
    width, head_dim = fields.count("rotary_dim"), layer.mixer.head_dim
    if width > head_dim or width % 2:
        raise fields.wrong("rotary_dim", f"must be even, and at most the width of a head ({head_dim})")
    return with_parts(layer, mixer={"rope": replace(rope, share=width / head_dim)})


def _rotated_in_windows(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    return layer if layer.mixer.window is not None else with_parts(layer, mixer={"rope": None})


def _scaled_embedding(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, embedding_scale=spec.hidden**0.5) if fields.flag("mup_enabled") else spec


FAMILIES: dict[str, Family] = {
    "Dots1ForCausalLM": Family(
        windows="from",
        mixer={"qk_norm": QKNormSpec()},
        names={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        defaults={
            "moe_intermediate_size": 1408,
            "use_sliding_window": True,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "max_position_embeddings": 2048,
        },
        only={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)},
        read_layer=_like_deepseek,
    ),
    "Glm4MoeForCausalLM": Family(
        partial_rotary=True,
        names={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
        },
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        read_layer=_glm4,
    ),
    "SolarOpenForCausalLM": Family(
        partial_rotary=True,
        names={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1280,
            "intermediate_size": 10240,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
        only={"first_k_dense_replace": (0,), "use_qk_norm": (False,)},
        read_layer=_glm4,
    ),
    "HYV3ForCausalLM": Family(
        mixer={"qk_norm": QKNormSpec()},
        modules=ModuleNames(
            router="mlp.router.gate",
            correction="mlp.expert_bias",
            shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
            shared_down="mlp.shared_mlp.down_proj",
            others=(
                (".mlp.gate.weight", ".mlp.router.gate.weight"),
                (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
                (".mlp.shared_experts.", ".mlp.shared_mlp."),
            ),
        ),
        names={"routed_scaling_factor": "router_scaling_factor"},
        defaults={
            "head_dim": 128,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 2.826,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "max_position_embeddings": 131072,
        },
        read_layer=experts_in_place_of_mlps(**_SUMMED_TO_ONE, fp32="sums"),
    ),
    "MiniMaxM2ForCausalLM": Family(
        partial_rotary=True,
        mixer={"qk_norm": QKNormSpec(whole=True, weights="by head"), "qkv_bias": False, "out_bias": False},
        modules=ModuleNames(
            router="block_sparse_moe.gate",
            correction="block_sparse_moe.e_score_correction_bias",
            experts="block_sparse_moe.experts",
            expert=("w1", "w3", "w2"),
            others=((".mlp.", ".block_sparse_moe."),),
        ),
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5e6,
            "max_position_embeddings": 196608,
        },
        only={
            "scoring_func": ("sigmoid",),
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
        },
        read_layer=in_turn(
            _rotated_in_part, experts_in_place_of_mlps(scoring="sigmoid", correction=True, renormalise=True)
        ),
    ),
    "AfmoeForCausalLM": Family(
        windows="by type",
        mixer={"qk_norm": QKNormSpec(), "gate": GateSpec("sigmoid")},
        norms={"number": 4, "place": "around"},
        modules=ModuleNames(
            norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
            router="mlp.router.gate",
            correction="mlp.expert_bias",
        ),
        names={
            "sliding_window_pattern": "global_attn_every_n_layers",
            "first_k_dense_replace": "num_dense_layers",
            "routed_scaling_factor": "route_scale",
        },
        defaults={
            "head_dim": 128,
            "sliding_window": 1024,
            "sliding_window_pattern": 4,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 16384,
        },
        only={"score_func": ("sigmoid",), "route_norm": (True,)},
        read_layer=in_turn(_rotated_in_windows, experts_in_place_of_mlps(**_SUMMED_TO_ONE)),
        read_model=_scaled_embedding,
    ),
}
