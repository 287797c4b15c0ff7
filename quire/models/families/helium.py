"""Helium."""

from __future__ import annotations

from quire.models.families.family import Family
from quire.models.families.layers import interleaved

FAMILIES: dict[str, Family] = {
    "HeliumForCausalLM": Family(
        mixer={"out_bias": False},
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
            "max_position_embeddings": 4096,
        },
        read_layer=interleaved,
    ),
}
