"""Roofline times of one model on one device, corrected by what steps really take.

A step reads all weights once, or computes 2 FLOPs a weight and token, whichever is longer; attention reads the keys and
values of the context (Williams, Waterman, Patterson 2009, "Roofline").
"""

from __future__ import annotations

from quire.costmodel.hardware import Hardware
from quire.models.spec import ModelSpec

_LEARNING_RATE = 0.05
_TRUST = 20.0
"""Measured times beyond this factor of the prediction teach nothing (a stall of the machine)."""


class Roofline:
    """Predicts for the scheduler: the cost of a step (StepCost) and of putting a request back (PreemptionCost).

    Args:
        spec: The model.
        dtype: Of weights and KV cache.
        hardware: The device.
        block_size: Tokens a KV block.
    """

    def __init__(self, spec: ModelSpec, dtype: str, hardware: Hardware, block_size: int) -> None:
        self._hardware = hardware
        self._weight_ms = 1e3 * spec.weight_bytes(dtype) / hardware.bandwidth
        self._product_ms = 1e3 * 2 * spec.num_parameters / hardware.flops
        kv_bytes = spec.kv_bytes_per_token(dtype)
        self._kv_read_ms = 1e3 * kv_bytes / hardware.bandwidth
        self._score_ms = 1e3 * 4 * spec.layers * spec.heads * spec.head_dim / hardware.flops
        self._swap_ms = 2 * 1e3 * spec.kv_block_bytes(dtype, block_size) / hardware.host_bandwidth
        self._correction = 1.0

    def step_ms(self, tokens: int, context: int) -> float:
        """See StepCost."""
        products = max(self._weight_ms, tokens * self._product_ms)
        return self._correction * (self._hardware.overhead_ms + products + context * self._kv_read_ms)

    def token_ms(self, context: int) -> float:
        """See StepCost."""
        return self._correction * (self._product_ms + context * self._score_ms)

    def learn(self, predicted_ms: float, measured_ms: float) -> None:
        """See StepCost."""
        ratio = measured_ms / predicted_ms
        if 1 / _TRUST < ratio < _TRUST:
            self._correction *= 1 + _LEARNING_RATE * (ratio - 1)

    def recompute_ms(self, tokens: int) -> float:
        """See PreemptionCost."""
        return tokens * self.token_ms(tokens // 2)

    def swap_ms(self, blocks: int) -> float:
        """See PreemptionCost."""
        return blocks * self._swap_ms
