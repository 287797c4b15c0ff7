"""Qwen 2 and 3."""

from __future__ import annotations

from quire.models.families.family import Family
from quire.models.families.layers import mixture_or_mlp
from quire.models.layer_spec import QKNormSpec

_QWEN = {"use_sliding_window": False, "max_window_layers": 28, "max_position_embeddings": 32768}
FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family(windows="from", mixer={"qkv_bias": True}, defaults=_QWEN),
    "Qwen3ForCausalLM": Family(windows="from", mixer={"qk_norm": QKNormSpec()}, defaults=_QWEN | {"head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(
        windows="all",
        mixer={"qk_norm": QKNormSpec()},
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "use_sliding_window": False,
            "max_position_embeddings": 32768,
        },
        read_layer=mixture_or_mlp,
    ),
}
