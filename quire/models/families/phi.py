"""Phi 3, which stores queries, keys and values as one projection, and gate and up as another."""

from __future__ import annotations

from quire.models.families.family import Family, ModuleNames

FAMILIES: dict[str, Family] = {
    "Phi3ForCausalLM": Family(
        windows="all",
        partial_rotary=True,
        modules=ModuleNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
}
