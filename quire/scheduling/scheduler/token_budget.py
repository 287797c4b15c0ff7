"""What one step may hold: tokens, and beside decoding rows, milliseconds.

A prompt's chunk shrinks where it would make the streams of others stall: the more, the longer its context is and the
fewer other prompts wait. Knows nothing about blocks or slots.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.foundation.config.scheduler import PerformanceMode
from quire.scheduling.scheduler.lengths import IntArray
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.step import ScheduledStep

DECODE_SHARE = 1 / 2
"""Chunks may always take this share of the time that a step's decoding rows take alone."""
BACKLOG_SHARE = 1 / 16
"""Chunks may take this share of the time for all known prompts, so that a prompt waits for some 16 steps."""
MAX_STALL_MS = 140.0
"""A step is not made longer than this many milliseconds because of its share of the backlog."""
MIN_STALL_MS = 25.0
"""Where each token costs the same, a step with chunks may always take this many milliseconds: nobody notices."""
LONG_PROMPT_STEPS = 16
"""A prompt is long if it would take more than this many steps with all of their time for chunks."""
LONG_PROMPT_SHARE = 3 / 4
"""A long prompt takes at most this share of the time for chunks, so that prompts behind it get some."""
SMALLEST_CHUNK = 16
"""The first chunk of a step has at least this many tokens, so that a prompt gets through beside any streams."""


class StepCost(Protocol):
    """How long steps take, in milliseconds."""

    def step_ms(self, tokens: int, context: int) -> float:
        """A step of `tokens` rows of one token, whose contexts are `context` tokens in sum."""

    def token_ms(self, context: int) -> float:
        """One more token in a chunk, with a context of `context` tokens."""

    @property
    def free_tokens(self) -> int:
        """A step of up to this many tokens takes as long as reading the weights, whatever its chunks are."""

    def learn(self, step_ms: float, chunk_ms: float, measured_ms: float) -> None:
        """Learn that a step took `measured_ms` which was predicted to take `step_ms`, and `chunk_ms` for its chunks."""


@dataclass(frozen=True)
class StepTimeBudget:
    """The time of one step.

    Example: 200 rows decode, which takes 10 ms alone; each further token takes 0.05 ms, and known prompts have 8,000
    tokens left, 400 ms. With 170 free tokens, chunks may take the most of

        half of 10 ms = 5 ms;    170 - 200 tokens: nothing;    a 16th of 400 ms = 25 ms (10 + 25 is less than 140)

    so `limit_ms` is 35. The first chunk could have 25 / 0.05 = 500 tokens, 700 in the step. With sizes 512, 640 and 768
    the step gets 640 tokens, as 641 to 700 would take as long as 768: the chunk has 440.

    Attributes:
        decode_ms: Predicted for the step without its chunks.
        limit_ms: For the whole step at most; None where chunks are limited by tokens only.
        smallest_ms: Predicted for the smallest chunk.
        backlog: Tokens of all known prompts that are not computed.
        sizes: Numbers of tokens up to which the step takes equally long, ascending; empty if each token counts.
    """

    decode_ms: float = 0.0
    limit_ms: float | None = None
    smallest_ms: float = 0.0
    backlog: int = 0
    sizes: Sequence[int] = ()

    def chunk_tokens(self, affordable: int, used: int, is_first: bool) -> int:
        """Tokens of the next chunk: what there is time for, rounded down so that the step has one of the sizes.

        Args:
            affordable: Tokens that there is time for.
            used: Tokens in the step already.
            is_first: Whether this is the step's first chunk, which has at least SMALLEST_CHUNK tokens; others have at
                least 1. If no size lies between, it is rounded up.
        """
        most, least = used + max(SMALLEST_CHUNK, affordable), used + (SMALLEST_CHUNK if is_first else 1)
        below, above = bisect_right(self.sizes, most), bisect_left(self.sizes, least)
        if below > above:
            return self.sizes[below - 1] - used
        if above < len(self.sizes):
            return self.sizes[above] - used
        return most - used


def step_limit_ms(
    cost: StepCost, decode_ms: float, rows: int, backlog: int, backlog_share: float = BACKLOG_SHARE, padded: bool = True
) -> float:
    """The time limit, in milliseconds, for a step in which so many rows decode; StepTimeBudget has an example.

    Args:
        backlog: Tokens of all known prompts that are not computed.
        backlog_share: The share of the time for these tokens that chunks may take.
        padded: Whether steps are padded to certain sizes; else each token costs the same.
    """
    token_ms = cost.token_ms(0)
    return max(
        decode_ms * (1 + DECODE_SHARE),
        decode_ms + token_ms * (cost.free_tokens - rows),
        min(decode_ms + backlog_share * token_ms * backlog, MAX_STALL_MS),
        0.0 if padded else MIN_STALL_MS,
    )


class TokenBudget:
    """Tokens that each row may compute in a step: limits of tokens and, by a StepTimeBudget, of time.

    Args:
        step_tokens: Maximum number of tokens of a step.
        long_prefill_threshold: Maximum number of tokens of one row; 0 for no such limit.
        cost: Predicts milliseconds; without it only tokens count.
        sizes: (tokens, rows), ascending: a step with chunks takes equally long up to so many tokens, if it has at most
            so many rows, because it is padded to them or computes whole tiles. Where time limits a chunk, the step gets
            one of these sizes. Empty if each token counts.
        mode: Whether chunks may take a share of the time that grows with the backlog (`balanced`), a share that does
            not (`interactivity`), or all of it (`throughput`).
        whole_texts: Whether each text is computed in one step, since its tokens see those behind them.

    Attributes:
        shorteners: Each returns how many of a chunk's tokens come before the next place where the chunk must end.
        whole: Returns how many tokens a chunk of this many of at most that many has, where some are computed together;
            None: a chunk may end anywhere.
    """

    def __init__(
        self,
        step_tokens: int,
        long_prefill_threshold: int = 0,
        cost: StepCost | None = None,
        sizes: Sequence[tuple[int, int]] = (),
        mode: PerformanceMode = "balanced",
        *,
        whole_texts: bool = False,
    ) -> None:
        self.step_tokens = step_tokens
        self._whole_texts = whole_texts
        self._threshold = long_prefill_threshold
        self._cost = cost
        self._sizes = sizes
        self._mode = mode
        self.shorteners: list[Callable[[Request, int], int]] = []
        self.whole: Callable[[Request, int, int], int] | None = None
        self._step = StepTimeBudget()
        self._chunk_ms = 0.0  # predicted for the chunks granted in this step
        self._is_full = False  # time has limited a chunk of this step, so there is none for another

    @property
    def predicted_ms(self) -> tuple[float, float]:
        """How long the step should take without its chunks, and its chunks beyond that, in milliseconds."""
        return self._step.decode_ms, self._chunk_ms

    def start_step(
        self, planned: IntArray, uncomputed: IntArray, requests: Sequence[Request], waiting: int = 0
    ) -> IntArray:
        """Start a step, and return how many of its tokens each running request gets, in queue order.

        Args:
            uncomputed: Tokens that each running request could compute.
            waiting: Tokens that waiting requests have to compute, if the cache holds nothing of theirs.
        """
        self._step, self._chunk_ms, self._is_full = self._step_budget(planned, uncomputed, waiting), 0.0, False
        counts = uncomputed.copy()
        used = int((uncomputed == 1).sum())
        for place in (uncomputed > 1).nonzero()[0].tolist():
            counts[place] = 0 if self._time_is_up else self._chunk(requests[place], int(uncomputed[place]), used)
            used += int(counts[place])
        if counts.sum() <= self.step_tokens:
            return counts
        left = np.maximum(0, self.step_tokens - (np.cumsum(counts) - counts))
        granted: IntArray = np.minimum(counts, left)
        for place in (granted < counts).nonzero()[0].tolist() if self.whole is not None else ():
            granted[place] = self._whole(requests[place], int(granted[place]), int(left[place]))
        return granted

    def start_idle_step(self) -> None:
        """Start a step that has only what will be admitted."""
        decode_ms = 0.0 if self._cost is None else self._cost.step_ms(1, 0)
        self._step, self._chunk_ms, self._is_full = StepTimeBudget(decode_ms), 0.0, False

    def grant_drafts(self, counts: IntArray, wanted: IntArray) -> IntArray:
        """Share what `counts` leave of the step's tokens among draft tokens, in queue order. They count for no time:
        the worker makes as many of them as pay.

        Args:
            wanted: Draft tokens of each; 0 for those that do not decode.
        """
        left = self.step_tokens - int(counts.sum()) - (np.cumsum(wanted) - wanted)
        granted: IntArray = np.minimum(wanted, np.maximum(0, left))
        return granted

    def has_room(self, used: int) -> bool:
        """Whether tokens are left for a new request when `used` are in the step."""
        return used < self.step_tokens

    def fits(self, request: Request, used: int) -> bool:
        """Whether a new request can begin when `used` tokens are in the step: all of it, where texts are whole."""
        return not self._whole_texts or request.num_uncomputed <= self.step_tokens - used

    def has_time(self, uncomputed: int) -> bool:
        """Whether time is left for a new request with so many tokens to compute; a single token takes next to none."""
        return uncomputed <= 1 or not self._time_is_up

    def grant(self, request: Request, used: int) -> int:
        """How many tokens a newly admitted request may compute: at least 1 while there is room."""
        return self._chunk(request, min(request.num_uncomputed, self.step_tokens - used), used)

    def learn(self, step: ScheduledStep, measured_ms: float) -> None:
        """Learn how long a step really took."""
        if self._cost is not None and step.requests and measured_ms > 0:
            self._cost.learn(*step.predicted_ms, measured_ms)

    @property
    def _chunk_ms_left(self) -> float:
        assert self._step.limit_ms is not None
        return self._step.limit_ms - self._step.decode_ms - self._chunk_ms

    @property
    def _time_is_up(self) -> bool:
        """Whether no further chunk fits. The first one always does."""
        if self._step.limit_ms is None or self._chunk_ms == 0:
            return False
        return self._is_full or self._chunk_ms_left < self._step.smallest_ms

    def _step_budget(self, planned: IntArray, uncomputed: IntArray, waiting: int) -> StepTimeBudget:
        if self._cost is None:
            return StepTimeBudget()
        decoding = uncomputed == 1
        rows = int(decoding.sum())
        decode_ms = self._cost.step_ms(max(1, rows), int(planned[decoding].sum()))
        if rows == 0 or self._mode == "throughput":
            return StepTimeBudget(decode_ms)
        token_ms = self._cost.token_ms(0)
        backlog = waiting + int(uncomputed[uncomputed > 1].sum())
        share = BACKLOG_SHARE if self._mode == "balanced" else 0.0
        return StepTimeBudget(
            decode_ms,
            step_limit_ms(self._cost, decode_ms, rows, backlog, share, padded=bool(self._sizes)),
            SMALLEST_CHUNK * token_ms,
            backlog,
            [tokens for tokens, max_rows in self._sizes if max_rows > rows],  # a chunk is a row as well
        )

    def _chunk(self, request: Request, count: int, used: int) -> int:
        """`count` tokens, or fewer where a limit says so, in a step that has `used` tokens already."""
        found = self._shortened(request, count, used)
        return self._whole(request, found, count)

    def _whole(self, request: Request, count: int, most: int) -> int:
        return count if self.whole is None or not request.add.media else self.whole(request, count, most)

    def _shortened(self, request: Request, count: int, used: int) -> int:
        if count <= 1:
            return count
        if self._threshold and not self._whole_texts:
            count = min(count, self._threshold)
        for shorten in self.shorteners:
            count = shorten(request, count)
        if self._cost is None:
            return count
        token_ms = self._cost.token_ms(request.planned + count // 2)
        if self._step.limit_ms is not None:
            left_ms = self._chunk_ms_left
            is_long = count * token_ms > LONG_PROMPT_STEPS * left_ms and count < self._step.backlog
            affordable = int(left_ms * (LONG_PROMPT_SHARE if is_long else 1.0) / token_ms)
            limit = self._step.chunk_tokens(affordable, used, is_first=self._chunk_ms == 0)
            self._is_full = limit < count and not is_long
            count = min(count, limit)
        self._chunk_ms += count * token_ms
        return count
