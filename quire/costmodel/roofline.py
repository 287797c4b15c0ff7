"""Roofline times of one model on one device, corrected by what steps really take.

A step reads all weights once, or computes 2 FLOPs a weight and token, whichever is longer; attention reads the keys and
values of the context (Williams, Waterman, Patterson 2009, "Roofline").
"""

from __future__ import annotations

from quire.costmodel.hardware import Hardware
from quire.models.spec import ModelSpec

_SLOWEST_LEARNING = 0.05
_TRUST = 20.0
"""A measured time beyond this factor of the expected one teaches nothing (a stall of the machine)."""


class Correction:
    """A factor on predictions, learned from what was measured: fast at first, then slowly."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._seen = 0

    def learn(self, predicted: float, measured: float) -> None:
        """Something predicted with this factor took `measured` instead."""
        ratio = measured / predicted
        if 1 / _TRUST < ratio < _TRUST:
            self._seen += 1
            self.factor *= 1 + max(_SLOWEST_LEARNING, 1 / (1 + self._seen)) * (ratio - 1)


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
        self._step = Correction()  # kept apart: small models are bound by the overhead of a step, not by tokens
        self._chunk = Correction()

    def step_ms(self, tokens: int, context: int) -> float:
        """See StepCost."""
        products = max(self._weight_ms, tokens * self._product_ms)
        return self._step.factor * (self._hardware.overhead_ms + products + context * self._kv_read_ms)

    def token_ms(self, context: int) -> float:
        """See StepCost."""
        return self._chunk.factor * (self._product_ms + context * self._score_ms)

    def learn(self, step_ms: float, chunk_ms: float, measured_ms: float) -> None:
        """See StepCost."""
        if not chunk_ms:
            self._step.learn(step_ms, measured_ms)
        elif measured_ms > step_ms:
            self._chunk.learn(chunk_ms, measured_ms - step_ms)

    def recompute_ms(self, tokens: int) -> float:
        """See PreemptionCost."""
        return tokens * self.token_ms(tokens // 2)

    def swap_ms(self, blocks: int) -> float:
        """See PreemptionCost."""
        return blocks * self._swap_ms
