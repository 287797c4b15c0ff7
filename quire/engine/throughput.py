"""How fast the engine works off its queue: tokens a second, measured while requests wait for room.

While nothing waits, the engine does what it is asked for, and not what it could do; so that time does not count.
"""

from __future__ import annotations

import math

_TIME_CONSTANT_S = 10.0
"""What was measured this long ago counts for 1/e."""
_ESTIMATE_S = 1.0
"""The estimate from before the first measurement counts as so many seconds of measuring."""
_LONGEST_S = 1.0
"""A longer time between two results is no work but a pause, and counts as this."""


class Throughput:
    """An exponentially weighted mean of tokens a second.

    Args:
        estimate: Counts until something is measured; 0 if unknown.
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
