"""Roofline times of one model on one device, corrected by what steps really take.

A step reads the weights that its tokens need once, or computes 2 FLOPs a weight and token, whichever is longer;
attention reads the keys and values of the context, as far back as a layer looks (Williams, Waterman, Patterson 2009,
"Roofline").
"""

from __future__ import annotations

from collections import Counter

from quire.costmodel.hardware import Hardware
from quire.models.spec import DTYPE_BYTES, ModelSpec

_SLOWEST_LEARNING = 0.05
_TRUST = 20.0
"""A measured time beyond this factor of the expected one teaches nothing (a stall of the machine)."""
_MANY = 1_000
"""So many tokens go to every expert of a mixture."""


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


class UsedWeights:
    """How many of a model's weights a step uses. A table of embeddings that is only looked up costs nothing.

    Args:
        spec: The model.
    """

    def __init__(self, spec: ModelSpec) -> None:
        experts, looked_up = spec.experts, 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden
        self._count, self._chosen = (experts.count, experts.chosen) if experts else (1, 0)
        self._each = 3 * spec.hidden * experts.width * len(experts.layers) if experts else 0  # over all layers
        self._always = spec.num_parameters - self._count * self._each - looked_up

    @property
    def by_token(self) -> int:
        """That each token is multiplied with."""
        return self._always + self._chosen * self._each

    def read(self, tokens: int) -> float:
        """That are read for so many tokens, if each goes to any experts of a layer with equal chance: an expert is left
        alone by a token with 1 - chosen / count."""
        touched = self._count * (1 - (1 - self._chosen / self._count) ** tokens)
        return self._always + touched * self._each


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
        self._used = UsedWeights(spec)
        self._weight_ms = 1e3 * DTYPE_BYTES[dtype] / hardware.bandwidth
        self._product_ms = 1e3 * 2 * self._used.by_token / hardware.flops
        self._windows = Counter(spec.window if local else None for local in spec.local)  # layers by how far they look
        self._kv_read_ms = 1e3 * spec.kv_bytes_per_token(dtype) / spec.layers / hardware.bandwidth
        self._score_ms = 1e3 * 4 * spec.heads * spec.head_dim / hardware.flops
        least_ms = hardware.overhead_ms + self._used.read(_MANY) * self._weight_ms  # of a step with a chunk in it
        self._free_tokens = int(least_ms / self._product_ms)
        self._telling_ms = max(least_ms, spec.layers * hardware.launch_ms)
        self._swap_ms = 2 * 1e3 * spec.kv_block_bytes(dtype, block_size) / hardware.host_bandwidth
        self._step = Correction()  # kept apart: small models are bound by the overhead of a step, not by tokens
        self._chunk = Correction()

    def step_ms(self, tokens: int, context: int) -> float:
        """See StepCost."""
        products = max(self._used.read(tokens) * self._weight_ms, tokens * self._product_ms)
        reads = self._seen(tokens, context) * self._kv_read_ms
        return self._step.factor * (self._hardware.overhead_ms + products + reads)

    def token_ms(self, context: int) -> float:
        """See StepCost."""
        return self._chunk.factor * (self._product_ms + self._seen(1, context) * self._score_ms)

    @property
    def free_tokens(self) -> int:
        """See StepCost. Tokens of a chunk read all weights, also those of experts that single tokens leave alone."""
        return self._free_tokens

    def _seen(self, tokens: int, context: int) -> int:
        """Positions that so many tokens see in sum over all layers, if their contexts are equally long."""
        return sum(
            layers * (context if window is None else min(context, tokens * window))
            for window, layers in self._windows.items()
        )

    def learn(self, step_ms: float, chunk_ms: float, measured_ms: float) -> None:
        """See StepCost. Short chunks teach nothing: they cost little where the weights are read anyway, and much where
        launching takes longer; neither is their tokens' doing."""
        if not chunk_ms:
            self._step.learn(step_ms, measured_ms)
        elif measured_ms > step_ms and chunk_ms > self._chunk.factor * self._telling_ms:
            self._chunk.learn(chunk_ms, measured_ms - step_ms)

    def recompute_ms(self, tokens: int) -> float:
        """See PreemptionCost."""
        return tokens * self.token_ms(tokens // 2)

    def swap_ms(self, blocks: int) -> float:
        """See PreemptionCost."""
        return blocks * self._swap_ms
