"""ERNIE 4.5."""

from __future__ import annotations

from quire.models.families.family import Family
from quire.models.families.layers import interleaved

FAMILIES: dict[str, Family] = {
    "Ernie4_5ForCausalLM": Family(
        names={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        read_layer=interleaved,
    ),
}
