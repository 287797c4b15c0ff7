"""What one step may hold: tokens, and beside rows that already stream, milliseconds.

A prompt's chunk shrinks where it would make the streams of others stall, and the more so the longer its context is and
the fewer other prompts wait.
Knows nothing about blocks or slots.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.config.scheduler import PerformanceMode
from quire.scheduler.lengths import IntArray
from quire.scheduler.request import Request
from quire.scheduler.step import ScheduledStep

STREAMS_SHARE = 1 / 2
"""Chunks in a step may take this share of the time that its streaming rows take alone; or, if that is more, as long as
fills the step with the tokens that are all but free, because their weights are read anyway; or …"""
BACKLOG_SHARE = 1 / 16
"""… this share of the time for all prompts that are known. So a queue is worked off in larger steps the longer it is,
and a prompt waits for some 16 steps. But then …"""
LONGEST_STALL_MS = 140.0
"""… the whole step should not take longer than this."""
SHORTEST_STALL_MS = 25.0
"""Where each token costs the same, small chunks save nothing: there a step with chunks may last for this long in any
case, which no reader notices."""
PATIENCE = 16
"""A prompt that would take so many more steps for itself is long. Those behind it do not wait for all of it, but …"""
LONG_SHARE = 3 / 4
"""… it takes this share of the time for chunks."""
SMALLEST_CHUNK = 16
"""Tokens that a prompt moves forward by at least, so that it gets through beside any number of streams. What would fit
less after another prompt's chunk is left alone."""


class StepCost(Protocol):
    """How long steps take, in milliseconds."""

    def step_ms(self, tokens: int, context: int) -> float:
        """A step of `tokens` rows of one token, that see `context` tokens in sum."""
        ...

    def token_ms(self, context: int) -> float:
        """One token more in a chunk, that sees `context` tokens."""
        ...

    @property
    def free_tokens(self) -> int:
        """A step of up to so many tokens takes as long as one with a single token in a chunk: the weights are read."""
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
        sizes: Numbers of tokens from which on a step with chunks takes longer, ascending, and rows up to which it does:
            it is padded to the next, or products compute whole tiles. Where time cuts a chunk, the step has just so
            many tokens, so that nothing is computed for nobody. None: each token counts.
        mode: What prompts may take of the time of rows that stream: a share that grows with the queue, what is all but
            free, or all of it, where nobody reads before all is there.
    """

    def __init__(
        self,
        max_tokens: int,
        long_prefill_threshold: int = 0,
        cost: StepCost | None = None,
        sizes: Sequence[tuple[int, int]] = (),
        mode: PerformanceMode = "balanced",
    ) -> None:
        self.max_tokens = max_tokens
        self._threshold = long_prefill_threshold
        self._cost = cost
        self._sizes_of_rows = sizes
        self._sizes: list[int] = []  # that this step may have
        self._mode = mode
        self._step_ms = self._chunk_ms = 0.0  # predicted for this step, and for the chunks granted in it
        self._limit_ms: float | None = None  # of the whole step; None: nobody streams
        self._smallest_ms = 0.0  # the smallest chunk
        self._backlog = 0  # tokens of all known prompts
        self._is_cut = False  # whether time has cut a chunk of this step, so that there is none for others

    def open(self, planned: IntArray, ahead: IntArray, requests: Sequence[Request], waiting: int = 0) -> IntArray:
        """A new step begins: how many tokens each running request may move forward by.

        Args:
            planned, ahead: Of the running requests, in the order of rank.
            requests: The same.
            waiting: Tokens that waiting requests are behind, if the cache holds nothing of theirs.
        """
        self._start_clock(planned, ahead, waiting)
        counts = ahead.copy()
        used = int((ahead == 1).sum())
        for index in (ahead > 1).nonzero()[0].tolist():
            counts[index] = 0 if self._time_is_up else self._chunk(requests[index], int(ahead[index]), used)
            used += int(counts[index])
        if counts.sum() <= self.max_tokens:
            return counts
        left = np.maximum(0, self.max_tokens - (np.cumsum(counts) - counts))
        granted: IntArray = np.minimum(counts, left)
        return granted

    def open_idle(self) -> None:
        """A new step begins, and nobody runs: it will have only what is admitted."""
        self._limit_ms, self._chunk_ms, self._is_cut = None, 0.0, False
        self._step_ms = 0.0 if self._cost is None else self._cost.step_ms(1, 0)

    def guess(self, planned: IntArray, counts: IntArray, wanted: IntArray) -> IntArray:
        """How many guesses each request gets of what `counts` leave of the step's tokens, in the order of rank.

        Args:
            planned, counts: Of those that move.
            wanted: Of the same; 0 for those that do not stream.
        """
        left = self.max_tokens - int(counts.sum()) - (np.cumsum(wanted) - wanted)
        granted: IntArray = np.minimum(wanted, np.maximum(0, left))
        if self._cost is not None and granted.any():
            streaming = counts == 1
            self._step_ms = self._cost.step_ms(int(streaming.sum() + granted.sum()), int(planned[streaming].sum()))
        return granted

    def has_room(self, used: int) -> bool:
        """Whether a request could be admitted, when `used` tokens are in the step already, if there is time for it."""
        return used < self.max_tokens

    def has_time(self, ahead: int) -> bool:
        """Whether there is time for a newly admitted request of so many tokens: a single one takes next to none."""
        return ahead <= 1 or not self._time_is_up

    def grant(self, request: Request, used: int) -> int:
        """How many tokens a newly admitted request may move forward by: at least 1 while there is room."""
        return self._chunk(request, min(request.num_new_tokens, self.max_tokens - used), used)

    @property
    def predicted_ms(self) -> tuple[float, float]:
        """How long the step should take without its chunks, and its chunks beyond that."""
        return self._step_ms, self._chunk_ms

    def learn(self, step: ScheduledStep, measured_ms: float) -> None:
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
        """Whether chunks have taken the time that rows beside them leave. The first always gets its smallest."""
        return self._limit_ms is not None and self._chunk_ms > 0 and (self._is_cut or self._left_ms < self._smallest_ms)

    def _start_clock(self, planned: IntArray, ahead: IntArray, waiting: int) -> None:
        self._limit_ms, self._step_ms, self._chunk_ms, self._is_cut = None, 0.0, 0.0, False
        if self._cost is None:
            return
        streaming = ahead == 1
        count = int(streaming.sum())
        self._step_ms = self._cost.step_ms(max(1, count), int(planned[streaming].sum()))
        if count and self._mode != "throughput":
            each = self._cost.token_ms(0)
            self._backlog = waiting + int(ahead[ahead > 1].sum())
            for_queue = (BACKLOG_SHARE if self._mode == "balanced" else 0.0) * each * self._backlog
            self._smallest_ms = SMALLEST_CHUNK * each
            self._sizes = [tokens for tokens, rows in self._sizes_of_rows if rows > count]  # a chunk is a row as well
            self._limit_ms = max(
                self._step_ms * (1 + STREAMS_SHARE),
                self._step_ms + each * (self._cost.free_tokens - count),
                min(self._step_ms + for_queue, LONGEST_STALL_MS),
                0.0 if self._sizes_of_rows else SHORTEST_STALL_MS,
            )

    def _chunk(self, request: Request, count: int, used: int) -> int:
        """`count`, or less where a limit says so, in a step that has `used` tokens already."""
        if count <= 1:
            return count
        if self._threshold:
            count = min(count, self._threshold)
        if self._cost is not None:
            each = self._cost.token_ms(request.planned + count // 2)
            if self._limit_ms is not None:
                is_long = PATIENCE * self._left_ms < count * each and count < self._backlog
                fitting = self._fitting(self._left_ms * (LONG_SHARE if is_long else 1.0) / each, used)
                self._is_cut = fitting < count and not is_long
                count = min(count, fitting)
            self._chunk_ms += count * each
        return count

    def _fitting(self, tokens: float, used: int) -> int:
        """So many tokens, which fit the time, or fewer that fill a step of `used` tokens up to one of the sizes. At
        least the smallest chunk if it is the step's first, at least 1 of those behind it."""
        total = used + max(SMALLEST_CHUNK, int(tokens))
        least = used + (1 if self._chunk_ms else SMALLEST_CHUNK)
        below, above = bisect_right(self._sizes, total), bisect_left(self._sizes, least)
        if below > above:
            total = self._sizes[below - 1]
        elif above < len(self._sizes):
            total = self._sizes[above]
        return total - used
