"""How long a step may take before the engine counts as stuck, from how long steps have taken.

Judged by the number of tokens, in the buckets of STEP_TOKEN_BOUNDS. Knows no clock.
"""

from __future__ import annotations

from bisect import bisect_left

from quire.foundation.config.parallel import ParallelConfig
from quire.foundation.messages.from_engine import STEP_TOKEN_BOUNDS

FACTOR = 10.0
"""A step may take this many times as long as the slowest of its size."""
SHORTEST_S = 4.0
"""Least time that any step gets, in seconds: a busy machine may leave a process alone for that long."""
SHORTEST_OF_GROUP_S = 60.0
"""Least time that any step gets where engines share experts, in seconds: it may wait for another engine's step, and the
ranks find out which one keeps them waiting."""
UNKNOWN_S = 60.0
"""Least time that a step gets if its size was not measured yet, in seconds: it may be the first to compile a kernel."""
_UNKNOWN_FACTOR = 3.0
"""A step whose size was not measured yet may take this many times what it would take if time grew with the tokens."""
_FORGETTING = 0.98
"""The share of the slowest step's time that is kept at each later step of its size."""


class StepDeadline:
    """Learns from steps, and judges the oldest one in flight.

    Args:
        shortest_s: Least time that any step gets, in seconds.
    """

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
        smaller = (
            (bound, seconds)
            for bound, seconds in zip(STEP_TOKEN_BOUNDS[:bucket], self._slowest, strict=False)
            if seconds is not None
        )
        bound, seconds = max(smaller, default=(1, 0.0))
        longest = _UNKNOWN_FACTOR * seconds * tokens / bound  # time grows no faster than the tokens
        return max(UNKNOWN_S, self._shortest_s, longest)


def shortest_limit_s(parallel: ParallelConfig) -> float:
    """Least time that any step of such an engine gets, in seconds: more than its ranks wait for another engine's."""
    if not parallel.engines_share_experts:
        return SHORTEST_S
    return max(SHORTEST_OF_GROUP_S, 3.0 * (parallel.distributed_timeout_seconds or 0))
