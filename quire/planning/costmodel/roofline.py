"""Roofline times of one model on one device, corrected by what steps really take.

A step reads the weights that its tokens need once, or computes 2 FLOPs a weight and token, whichever is longer;
attention reads the keys and values of the context, as far back as a layer looks (Williams, Waterman, Patterson 2009,
"Roofline").
"""

from __future__ import annotations

from quire.foundation.config.cache import element_bytes
from quire.models.spec import DTYPE_BYTES, ModelSpec
from quire.planning.costmodel.hardware import Hardware
from quire.planning.costmodel.step_work import Attended, UsedWeights, attention_of

_MIN_LEARNING_RATE = 0.05
_USUAL_CONTEXT = 1_024
_USUAL_PROMPT = 4
"""Prompt tokens for each output token, in a guess about requests that have not come yet."""
_MAX_RATIO = 20.0
"""A measured time that differs from the prediction by more than this factor is ignored: the machine stalled."""
_ALL_EXPERTS_TOKENS = 1_000
"""Tokens in a step that are certain to use every expert of a mixture."""


class Correction:
    """A factor on predictions, learned from what was measured: fast at first, then slowly."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._seen = 0

    def learn(self, predicted: float, measured: float) -> None:
        """Learn from a prediction with this factor and the time that was measured."""
        ratio = measured / predicted
        if 1 / _MAX_RATIO < ratio < _MAX_RATIO:
            self._seen += 1
            self.factor *= 1 + max(_MIN_LEARNING_RATE, 1 / (1 + self._seen)) * (ratio - 1)


class Roofline:
    """Predicts the cost of steps (StepCost) and of preemptions (PreemptionCost) for the scheduler. `kv_dtype` is the
    dtype of the KV cache; None for that of the weights."""

    def __init__(
        self, spec: ModelSpec, dtype: str, hardware: Hardware, block_size: int, kv_dtype: str | None = None
    ) -> None:
        kv_dtype = kv_dtype or dtype
        self._hardware = hardware
        self._used = UsedWeights(spec)
        self._weight_ms = 1e3 * self._used.mean_bytes(dtype) / hardware.bandwidth
        self._product_ms = 1e3 * 2 * self._used.per_token / hardware.flops
        self._attention = attention_of(spec)
        self._element_ms = 1e3 * element_bytes(kv_dtype, DTYPE_BYTES) / hardware.bandwidth
        self._flop_ms = 1e3 / hardware.flops
        # The least time of a step with a chunk in it.
        least_ms = hardware.overhead_ms + self._used.read(_ALL_EXPERTS_TOKENS) * self._weight_ms
        self._free_tokens = int(least_ms / self._product_ms)
        self._min_learned_ms = max(least_ms, len(spec.layers) * hardware.launch_ms)
        self._swap_ms = 2 * 1e3 * spec.kv_block_bytes(kv_dtype, block_size) / hardware.host_bandwidth
        self._step = Correction()  # kept apart: small models are bound by the overhead of a step, not by tokens
        self._chunk = Correction()

    def step_ms(self, tokens: int, context: int) -> float:
        products = max(self._used.read(tokens) * self._weight_ms, tokens * self._product_ms)
        reads = self._element_ms * sum(own.read * _positions(tokens, context, own) for own in self._attention)
        return self._step.factor * (self._hardware.overhead_ms + products + reads)

    def token_ms(self, context: int) -> float:
        scores = self._flop_ms * sum(own.scored * _positions(1, context, own) for own in self._attention)
        return self._chunk.factor * (self._product_ms + scores)

    @property
    def free_tokens(self) -> int:
        """Tokens that cost nothing in a step with a chunk, which reads the weights of all experts anyway."""
        return self._free_tokens

    def learn(self, step_ms: float, chunk_ms: float, measured_ms: float) -> None:
        """Learn from a measured step. Short chunks are ignored: their time depends on the weights that are read anyway
        and on launches, not on their tokens."""
        if not chunk_ms:
            self._step.learn(step_ms, measured_ms)
        elif measured_ms > step_ms and chunk_ms > self._chunk.factor * self._min_learned_ms:
            self._chunk.learn(chunk_ms, measured_ms - step_ms)

    def tokens_per_s(self, rows: int) -> float:
        """An estimate: tokens of prompts and outputs that a full engine of so many rows computes in a second."""
        decode_ms = self.step_ms(rows, rows * _USUAL_CONTEXT) / rows
        prompt_ms = _USUAL_PROMPT * self.token_ms(_USUAL_CONTEXT // 2)
        return 1e3 * (_USUAL_PROMPT + 1) / (prompt_ms + decode_ms)

    def recompute_ms(self, tokens: int) -> float:
        return tokens * self.token_ms(tokens // 2)

    def swap_ms(self, blocks: int) -> float:
        return blocks * self._swap_ms


def _positions(tokens: int, context: int, own: Attended) -> int:
    """Positions that these tokens see in a layer, if their contexts are equally long; `context` is that of all."""
    return context if own.window is None else min(context, tokens * own.window)
