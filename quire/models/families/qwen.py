"""Qwen 2 and 3, and Mellum 2, which is like Qwen 3."""

from __future__ import annotations

from quire.models.families.family import Family, ModuleNames
from quire.models.families.mixtures import experts_in_place_of_mlps
from quire.models.layer_spec import QKNormSpec

_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768}
FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family(windows="from", mixer={"qkv_bias": True}, defaults=_QWEN),
    "Qwen2MoeForCausalLM": Family(
        windows="none",
        mixer={"qkv_bias": True},
        modules=ModuleNames(
            shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            shared_down="mlp.shared_expert.down_proj",
        ),
        defaults=_QWEN
        | {
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        read_layer=experts_in_place_of_mlps(gated=True),
    ),
    "Qwen3ForCausalLM": Family(windows="from", mixer={"qk_norm": QKNormSpec()}, defaults=_QWEN | {"head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(
        windows="all",
        mixer={"qk_norm": QKNormSpec()},
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_position_embeddings": 32768,
        },
        read_layer=experts_in_place_of_mlps(),
    ),
    "MellumForCausalLM": Family(
        windows="by type",
        local_rope=True,
        partial_rotary=True,
        mixer={"qk_norm": QKNormSpec()},
        names={"num_experts": ("num_experts", "num_local_experts")},
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 4,
            "sliding_window": 1024,
            "sliding_window_pattern": 1,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        read_layer=experts_in_place_of_mlps(),
    ),
}
