"""What the engine's steps did, as heartbeats and `Load` report it, and how long the next ones may take."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from quire.foundation.config.parallel import ParallelConfig
from quire.foundation.messages.from_engine import STEP_TOKEN_BOUNDS, WORK_BOUNDS_S, Heartbeat, Load
from quire.foundation.messages.workers import Result

LONGEST_TURN_S = 2.0
"""A turn of the loop waits up to a second, so a longer one than this is the machine's pause."""
WARNED_S = 0.1
"""A turn that took more processor time than this, and than all before, is logged."""
logger = logging.getLogger(__name__)

FACTOR = 10.0
"""A step may take this many times as long as the slowest of its size."""
SHORTEST_S = 4.0
"""Least time that any step gets, in seconds: a busy machine may leave a process alone for that long."""
SHORTEST_OF_GROUP_S = 60.0
"""Least time that any step gets where engines share experts, in seconds: it may wait for another engine's step, and the
ranks find out which engine keeps them waiting."""
UNKNOWN_S = 60.0
"""Least time that a step gets if its size was not measured yet, in seconds: it may be the first to compile a kernel."""
_UNKNOWN_FACTOR = 3.0
"""A step whose size was not measured yet may take this many times what it would take if time grew with the tokens."""
_FORGETTING = 0.98
"""The share of the slowest step's time that is kept at each later step of its size."""
_TIME_CONSTANT_S = 10.0
"""What was measured this long ago counts for 1/e."""
_ESTIMATE_S = 1.0
"""The estimate from before the first measurement counts as so many seconds of measuring."""
_LONGEST_S = 1.0
"""A longer time between two results is no work but a pause, and counts as this."""


class StepDeadline:
    """How long a step may take before the engine counts as stuck, from how long steps of as many tokens took."""

    def __init__(self, shortest_s: float = SHORTEST_S) -> None:
        self._shortest_s = shortest_s
        self._slowest: list[float | None] = [None] * (len(STEP_TOKEN_BOUNDS) + 1)

    def learn(self, tokens: int, seconds: float) -> None:
        """Record that a step of so many tokens took so long."""
        bucket = bisect_left(STEP_TOKEN_BOUNDS, tokens)
        before = self._slowest[bucket]
        self._slowest[bucket] = seconds if before is None else max(seconds, _FORGETTING * before)

    def limit_s(self, tokens: int) -> float:
        """How long a step of so many tokens may take, in seconds."""
        bucket = bisect_left(STEP_TOKEN_BOUNDS, tokens)
        measured = self._slowest[bucket]
        if measured is not None:
            return max(self._shortest_s, FACTOR * measured)
        smaller = zip(STEP_TOKEN_BOUNDS[:bucket], self._slowest, strict=False)
        bound, seconds = max(((b, s) for b, s in smaller if s is not None), default=(1, 0.0))
        longest = _UNKNOWN_FACTOR * seconds * tokens / bound  # time grows no faster than the tokens
        return max(UNKNOWN_S, self._shortest_s, longest)


def shortest_limit_s(parallel: ParallelConfig) -> float:
    """Least time that any step of such an engine gets, in seconds: more than its ranks wait for another engine's."""
    if not parallel.engines_share_experts:
        return SHORTEST_S
    return max(SHORTEST_OF_GROUP_S, 3.0 * (parallel.distributed_timeout_seconds or 0))


class StepStats:
    """Statistics since the engine's start.

    Attributes:
        token_counts: Steps by the tokens they compute: a bucket for each of STEP_TOKEN_BOUNDS, and one above.
        token_sum: Tokens of all planned steps.
        last_step, last_step_ms: The last finished step, and its time on the device.
        turns: Turns of the loop by their processor time: a bucket for each of WORK_BOUNDS_S, and one above.
        turns_sum_s, longest_turn_s: Processor time of all turns, and of the longest.
        stalled_s: For how long no step has finished while there was one to do. A turn counts as LONGEST_TURN_S at most:
            when the whole machine stood still, no step is to blame.
    """

    def __init__(self, now: float = 0.0, shortest_limit_s: float = SHORTEST_S) -> None:
        self.token_counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self.token_sum = 0
        self.last_step, self.last_step_ms = 0, 0.0
        self.turns = [0] * (len(WORK_BOUNDS_S) + 1)
        self.turns_sum_s = self.longest_turn_s = 0.0
        self.stalled_s = 0.0
        self._last_turn = now
        self._in_flight: deque[int] = deque()  # tokens of each step
        self._deadline = StepDeadline(shortest_limit_s)

    @property
    def limit_s(self) -> float:
        """How long `stalled_s` may become with the oldest step in flight."""
        return self._deadline.limit_s(self._in_flight[0] if self._in_flight else 0)

    def planned(self, counts: Sequence[int]) -> None:
        """Record a submitted step, by the tokens of its rows."""
        tokens = sum(counts)
        self.token_counts[bisect_left(STEP_TOKEN_BOUNDS, tokens)] += 1
        self.token_sum += tokens
        self._in_flight.append(tokens)

    def finished(self, result: Result, now: float) -> None:
        """Record a step's result."""
        self.last_step, self.last_step_ms = result.step, result.device_ms
        self._count_time(now)
        self._deadline.learn(self._in_flight.popleft(), self.stalled_s)
        self.stalled_s = 0.0

    def turn_ended(self, now: float, *, idle: bool) -> None:
        """Record the end of a turn of the loop; `idle` if there is no step to do."""
        self._count_time(now)
        if idle:
            self.stalled_s = 0.0

    def _count_time(self, now: float) -> None:
        self.stalled_s += min(now - self._last_turn, LONGEST_TURN_S)
        self._last_turn = now

    def heartbeat(self, now: float, load: Load) -> Heartbeat:
        """The heartbeat for clients."""
        return Heartbeat(
            now,
            now - self.stalled_s,
            load,
            list(self.token_counts),
            self.token_sum,
            list(self.turns),
            self.turns_sum_s,
            self.longest_turn_s,
            limit_s=self.limit_s,
        )

    def turned(self, seconds: float) -> None:
        """Record how much processor time a turn of the loop took."""
        if seconds > max(WARNED_S, self.longest_turn_s):
            logger.warning("A turn of the engine's loop took %.0f ms of its thread's time.", seconds * 1e3)
        self.turns[bisect_left(WORK_BOUNDS_S, seconds)] += 1
        self.turns_sum_s += seconds
        self.longest_turn_s = max(self.longest_turn_s, seconds)


class Throughput:
    """How fast the engine works off its queue: an exponentially weighted mean of tokens a second. `estimate` counts
    until something is measured; 0 if unknown.

    Only times while requests wait for room count: otherwise the engine does what it is asked for, not what it could.
    """

    def __init__(self, estimate: float, now: float) -> None:
        self._seconds = _ESTIMATE_S if estimate else 0.0
        self._tokens = estimate * self._seconds
        self._then, self._total, self._was_saturated = now, 0, False

    @property
    def tokens_per_s(self) -> float:
        """The mean; 0 while it is unknown."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def update(self, now: float, total: int, *, saturated: bool) -> None:
        """Take in a finished step.

        Args:
            total: Tokens since the start that were computed, or found computed.
            saturated: Whether requests wait for room.
        """
        seconds, tokens = min(now - self._then, _LONGEST_S), total - self._total
        if saturated and self._was_saturated:
            weight = math.exp(-seconds / _TIME_CONSTANT_S)
            self._seconds = self._seconds * weight + seconds
            self._tokens = self._tokens * weight + tokens
        self._then, self._total, self._was_saturated = now, total, saturated
