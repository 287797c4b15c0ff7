"""Families that differ from others by their experts and routers: dots.llm1, GLM-4.5 to 4.7, and Hunyuan 3."""

from __future__ import annotations

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.mixtures import SIGMOID, experts_in_place_of_mlps
from quire.models.layer_spec import LayerSpec, QKNormSpec, with_parts

_like_deepseek = experts_in_place_of_mlps(**SIGMOID)


def _glm4(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    norm = QKNormSpec() if fields.flag("use_qk_norm") else None
    return _like_deepseek(fields, with_parts(layer, mixer={"qk_norm": norm, "out_bias": False}), number)


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
    "HYV3ForCausalLM": Family(
        mixer={"qk_norm": QKNormSpec()},
        modules=ModuleNames(
            router="mlp.router.gate",
            correction="mlp.expert_bias",
            shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
            shared_down="mlp.shared_mlp.down_proj",
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
        read_layer=experts_in_place_of_mlps(scoring="sigmoid", correction=True, renormalise=True, epsilon=1e-20),
    ),
}
