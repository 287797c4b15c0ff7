"""What LoRA adapters take of memory: arithmetic, without torch."""

from __future__ import annotations

from quire.config import Config
from quire.models.spec import DTYPE_BYTES, ModelSpec

_RANKS = 16
"""To a multiple of which a slot's ranks are rounded up (`lora/updates.py`)."""


def adapter_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes of all slots of the device; where that is a CPU, of the adapters that are kept on the host as well."""
    lora = config.lora
    if not lora.enable_lora:
        return 0
    number = lora.max_loras + (lora.host_adapters if config.device.device == "cpu" else 0)
    return number * _elements(spec, -(-lora.max_lora_rank // _RANKS) * _RANKS) * DTYPE_BYTES[config.model.dtype]


def _elements(spec: ModelSpec, rank: int) -> int:
    """Of one adapter, or a little more: as if every layer had a gated MLP, and no projections were stored as one."""
    q, kv, hidden, width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden, spec.intermediate
    attention = (3 * hidden + q + 2 * kv) + (q + hidden)
    mlp = (2 * hidden + 2 * width) + (width + hidden)
    return spec.layers * rank * (attention + mlp)
