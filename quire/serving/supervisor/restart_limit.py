"""How often dead processes may be replaced. Decides only."""

from __future__ import annotations

from collections import deque

from quire.foundation.clock import Clock

WINDOW_S = 600.0
"""What lies further back, in seconds, no longer counts."""
MAX_SEARCH = 16
"""Most deaths in a row that do not count, while the requests are looked for that cause them. One alone takes two."""


class RestartLimit:
    """Counts deaths within a window.

    Args:
        most: So many may be made good within WINDOW_S.
        clock: For the window.
    """

    def __init__(self, most: int, clock: Clock) -> None:
        self.most = most
        self._clock = clock
        self._deaths: deque[float] = deque()
        self._searched = 0

    @property
    def used(self) -> int:
        """Restarts within the window."""
        while self._deaths and self._deaths[0] < self._clock.now() - WINDOW_S:
            self._deaths.popleft()
        return len(self._deaths)

    def allow(self, *, again: bool = False, failed_starts: int = 0) -> bool:
        """A process has died: whether it may be replaced.

        Args:
            again: It has died with requests that were in flight when it died before, which does not count: one of them
                may kill engines, and fails when it does so alone.
            failed_starts: Its starts in a row that have failed. They count however long each has taken: ranks that
                load past their time would be started again for ever.
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
