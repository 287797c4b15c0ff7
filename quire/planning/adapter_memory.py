"""What LoRA adapters take of memory: arithmetic, without torch."""

from __future__ import annotations

from quire.foundation.config import Config
from quire.models.spec import DTYPE_BYTES, ModelSpec

_RANKS = 16
"""To a multiple of which a slot's ranks are rounded up (`models/lora/updates.py`)."""


def adapter_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes of all slots of the device; where that is a CPU, of the adapters that are kept on the host as well."""
    lora = config.lora
    if not lora.enable_lora:
        return 0
    on_cpu = config.device.device == "cpu"
    number = lora.max_loras + (lora.host_adapters if on_cpu else 0)
    rank = -(-lora.max_lora_rank // _RANKS) * _RANKS
    return number * _elements(spec, rank) * DTYPE_BYTES[config.model.dtype]


def _elements(spec: ModelSpec, rank: int) -> int:
    """Of one adapter, or a little more: as if every MLP had a gate, and no projections were stored as one."""
    q, kv, hidden = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden
    low_rank, outputs = spec.layers * (3 * hidden + q + 2 * kv + q + hidden), spec.layers * (q + 2 * kv + hidden)
    experts = spec.experts
    layers_of_experts = 0 if experts is None else len(experts.layers)
    mlps = [(spec.layers - layers_of_experts, spec.intermediate)]
    if experts is not None:
        low_rank, outputs = (each + layers_of_experts * experts.count for each in (low_rank, outputs))  # of routers
        low_rank += layers_of_experts * hidden
        mlps.append((layers_of_experts * experts.own, experts.width))
    for number, width in mlps:
        low_rank += number * (2 * hidden + 2 * width + width + hidden)
        outputs += number * (2 * width + hidden)
    return rank * low_rank + -(-2 * outputs // _RANKS) * _RANKS
