"""How often dead processes may be replaced."""

from __future__ import annotations

from collections import deque

from quire.foundation.clock import Clock

WINDOW_S = 600.0
"""Seconds after which a death no longer counts."""
MAX_SEARCH = 16
"""Maximum number of deaths in a row that do not count, while the request that causes them is searched. A single request
takes two."""


class RestartLimit:
    """Counts deaths within WINDOW_S, of which `most` may be made good."""

    def __init__(self, most: int, clock: Clock) -> None:
        self.most = most
        self._clock = clock
        self._deaths: deque[float] = deque()
        self._searched = 0

    @property
    def used(self) -> int:
        while self._deaths and self._deaths[0] < self._clock.now() - WINDOW_S:
            self._deaths.popleft()
        return len(self._deaths)

    def allow(self, *, again: bool = False, failed_starts: int = 0) -> bool:
        """Whether a process that has just died may be replaced.

        Args:
            again: It died with requests that were in flight when it died before. This does not count: one of them may
                kill engines, and fails when it does so alone.
            failed_starts: How many of its starts in a row have failed. They count however long each took: otherwise
                ranks that load for too long would be started again for ever.
        """
        if failed_starts > self.most:
            return False
        if again and self._searched < MAX_SEARCH and self.most:
            self._searched += 1
            return True
        if not again:
            self._searched = 0
        if self.used >= self.most:
            return False
        self._deaths.append(self._clock.now())
        return True
