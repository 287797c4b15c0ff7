"""What one step may hold: tokens, and beside rows that already stream, milliseconds.

A prompt's chunk shrinks where it would make the streams of others stall, and the more so the longer its context is and
the fewer other prompts wait.
Knows nothing about blocks or slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.scheduler.lengths import Column
from quire.scheduler.request import Request
from quire.scheduler.step import Step

STALL_FACTOR = 1.5
"""A step with chunks in it may take this many times as long as its streaming rows would alone: tokens cost little where
the weights are read for these anyway. Or it may take, if that is more, …"""
SHORTEST_STALL_MS = 25.0
"""… this long, which no reader notices: chunks of a few hundred tokens, where products are fast and what a step costs
beside them counts little, …"""
BACKLOG_SHARE = 1 / 8
"""… this share of the time for all prompts that are known, since a queue is worked off sooner in large steps, …"""
LONGEST_STALL_MS = 140.0
"""… but not longer than this."""
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

    @property
    def least_ms(self) -> float:
        """A step with a chunk in it takes at least this long, however short the chunk."""
        ...

    def learn(self, step_ms: float, chunk_ms: float, measured_ms: float) -> None:
        """What a step really took, that was predicted to take `step_ms` for itself and `chunk_ms` for its chunks."""
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
        self._step_ms = self._chunk_ms = 0.0  # predicted for this step, and for the chunks granted in it
        self._limit_ms: float | None = None  # of the whole step; None: nobody streams

    def open(self, planned: Column, ahead: Column, requests: Sequence[Request], waiting: int = 0) -> Column:
        """A new step begins: how many tokens each running request may move forward by.

        Args:
            planned, ahead: Of the running requests, in the order of rank.
            requests: The same.
            waiting: Tokens that waiting requests are behind, if the cache holds nothing of theirs.
        """
        self._start_clock(planned, ahead, waiting)
        counts = ahead.copy()
        for index in np.flatnonzero(ahead > 1).tolist():
            counts[index] = 0 if self._time_is_up else self._chunk(requests[index], int(ahead[index]))
        if counts.sum() <= self.max_tokens:
            return counts
        left = np.maximum(0, self.max_tokens - (np.cumsum(counts) - counts))
        granted: Column = np.minimum(counts, left)
        return granted

    def open_idle(self) -> None:
        """A new step begins, and nobody runs: it will have only what is admitted."""
        self._limit_ms, self._chunk_ms = None, 0.0
        self._step_ms = 0.0 if self._cost is None else self._cost.step_ms(1, 0)

    def guess(self, planned: Column, counts: Column, wanted: Column) -> Column:
        """How many guesses each request gets of what `counts` leave of the step's tokens, in the order of rank.

        Args:
            planned, counts: Of those that move.
            wanted: Of the same; 0 for those that do not stream.
        """
        left = self.max_tokens - int(counts.sum()) - (np.cumsum(wanted) - wanted)
        granted: Column = np.minimum(wanted, np.maximum(0, left))
        if self._cost is not None and granted.any():
            streaming = counts == 1
            self._step_ms = self._cost.step_ms(int(streaming.sum() + granted.sum()), int(planned[streaming].sum()))
        return granted

    def has_room(self, used: int) -> bool:
        """Whether a request could be admitted, when `used` tokens are in the step already."""
        return used < self.max_tokens and not self._time_is_up

    def grant(self, request: Request, used: int) -> int:
        """How many tokens a newly admitted request may move forward by: at least 1 while there is room."""
        return self._chunk(request, min(request.ahead, self.max_tokens - used))

    def close(self, step: Step) -> None:
        """Everything is in the step."""
        step.predicted_ms = self._step_ms, self._chunk_ms

    def learn(self, step: Step, measured_ms: float) -> None:
        """A step has run."""
        if self._cost is not None and step.requests and measured_ms > 0:
            self._cost.learn(*step.predicted_ms, measured_ms)

    @property
    def _left_ms(self) -> float:
        """For chunks, beside rows that stream."""
        assert self._limit_ms is not None
        return self._limit_ms - self._step_ms - self._chunk_ms

    @property
    def _time_is_up(self) -> bool:
        """Whether chunks have taken all the time that rows beside them leave. The first always gets its smallest."""
        return self._limit_ms is not None and self._chunk_ms > 0 and self._left_ms <= 0

    def _start_clock(self, planned: Column, ahead: Column, waiting: int) -> None:
        self._limit_ms, self._step_ms, self._chunk_ms = None, 0.0, 0.0
        if self._cost is None:
            return
        streaming = ahead == 1
        count = int(streaming.sum())
        self._step_ms = self._cost.step_ms(max(1, count), int(planned[streaming].sum()))
        if count:
            backlog_ms = (waiting + int(ahead[ahead > 1].sum())) * self._cost.token_ms(0)
            for_queue = min(BACKLOG_SHARE * backlog_ms, LONGEST_STALL_MS)
            self._limit_ms = max(STALL_FACTOR * self._step_ms, SHORTEST_STALL_MS, self._cost.least_ms, for_queue)

    def _chunk(self, request: Request, count: int) -> int:
        """`count`, or less where a limit says so."""
        if count <= 1:
            return count
        if self._threshold:
            count = min(count, self._threshold)
        if self._cost is not None:
            each = self._cost.token_ms(request.planned + count // 2)
            if self._limit_ms is not None:
                count = min(count, max(SMALLEST_CHUNK, int(self._left_ms / each)))
            self._chunk_ms += count * each
        return count
