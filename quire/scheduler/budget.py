"""What one step may hold: tokens, and beside rows that already stream, milliseconds.

A prompt's chunk shrinks where it would make the streams of others stall, and the more so the longer its context is.
Knows nothing about blocks or slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quire.scheduler.request import Request
from quire.scheduler.step import Step

STALL_FACTOR = 2.0
"""A step with chunks in it may take this many times as long as its streaming rows would alone …"""
STALL_FLOOR_MS = 20.0
"""… or this long, if that is more."""
SMALLEST_CHUNK = 16
"""Tokens that a prompt moves forward by at least, so that it gets through beside any number of streams."""


class StepCost(Protocol):
    """How long steps take, in milliseconds."""

    def step_ms(self, tokens: int, context: int) -> float:
        """A step of `tokens` rows of one token, that see `context` tokens in sum."""
        ...

    def token_ms(self, context: int) -> float:
        """One token more in a chunk, that sees `context` tokens."""
        ...

    def learn(self, predicted_ms: float, measured_ms: float) -> None:
        """What a step really took."""
        ...


class Budget:
    """Limits of a step.

    Args:
        max_tokens: Most tokens of a step.
        long_prefill_threshold: Most tokens of one row; 0 for no such limit.
        cost: Predicts milliseconds; without it only tokens count.
    """

    def __init__(self, max_tokens: int, long_prefill_threshold: int = 0, cost: StepCost | None = None) -> None:
        self.max_tokens = max_tokens
        self._threshold = long_prefill_threshold
        self._cost = cost
        self._chunk_ms: float | None = None  # left for chunks in this step; None: nobody streams

    def open(self, running: Iterable[Request]) -> None:
        """A new step begins beside these requests."""
        self._chunk_ms = None
        if self._cost is None:
            return
        streaming = [request for request in running if request.ahead == 1]
        if streaming:
            alone = self._cost.step_ms(len(streaming), sum(request.planned for request in streaming))
            self._chunk_ms = max(STALL_FLOOR_MS, STALL_FACTOR * alone) - alone

    def grant(self, request: Request, used: int) -> int:
        """How many tokens a request may move forward by, when `used` tokens are in the step already."""
        count = min(request.ahead, self.max_tokens - used)
        if count > 1 and self._threshold:
            count = min(count, self._threshold)
        if count > 1 and self._chunk_ms is not None:
            count = self._within_time(request, count)
        return count

    def learn(self, step: Step, measured_ms: float) -> None:
        """A step has run."""
        if self._cost is not None and step.rows and measured_ms > 0:
            context = sum(row.request.planned for row in step.rows)
            singles = sum(row.n == 1 for row in step.rows)
            predicted = self._cost.step_ms(max(1, singles), context)
            predicted += sum(row.n * self._cost.token_ms(row.request.planned) for row in step.rows if row.n > 1)
            self._cost.learn(predicted, measured_ms)

    def _within_time(self, request: Request, count: int) -> int:
        assert self._cost is not None and self._chunk_ms is not None
        each = self._cost.token_ms(request.planned + count // 2)
        count = min(count, max(SMALLEST_CHUNK, int(self._chunk_ms / each)))
        self._chunk_ms = max(0.0, self._chunk_ms - count * each)
        return count
