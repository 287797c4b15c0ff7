"""How long a step may take before the engine counts as stuck, from how long steps have taken.

Judged by the number of tokens, in the buckets of STEP_TOKEN_BOUNDS. Knows no clock.
"""

from __future__ import annotations

from bisect import bisect_left

from quire.config.parallel import ParallelConfig
from quire.messages.from_engine import STEP_TOKEN_BOUNDS

FACTOR = 10.0
"""A step may take so many times as long as the slowest of its size."""
SHORTEST_S = 4.0
"""What any step gets: a busy machine may leave a process alone for seconds."""
SHORTEST_OF_GROUP_S = 60.0
"""The same of engines that divide experts: a step may wait for another engine's, and ranks find out which keeps them
waiting."""
UNKNOWN_S = 60.0
"""What a step of a size gets that has not been measured, at least: it may be the first to compile a kernel."""
_UNKNOWN_FACTOR = 3.0
"""The same for a size that was not measured, of what it takes if time grows with the tokens."""
_FORGETTING = 0.98
"""The slowest step's share that remains after each one of its size."""


class StepDeadline:
    """Learns from steps, and judges the oldest one in flight.

    Args:
        shortest_s: What any step gets.
    """

    def __init__(self, shortest_s: float = SHORTEST_S) -> None:
        self._shortest_s = shortest_s
        self._slowest: list[float | None] = [None] * (len(STEP_TOKEN_BOUNDS) + 1)

    def learn(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        bucket = bisect_left(STEP_TOKEN_BOUNDS, tokens)
        before = self._slowest[bucket]
        self._slowest[bucket] = seconds if before is None else max(seconds, _FORGETTING * before)

    def limit_s(self, tokens: int) -> float:
        """What a step of so many tokens may take, in seconds."""
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
    """What any step of such an engine gets: more than its ranks wait for one of another engine."""
    if not parallel.engines_share_experts:
        return SHORTEST_S
    return max(SHORTEST_OF_GROUP_S, 3.0 * (parallel.distributed_timeout_seconds or 0))
