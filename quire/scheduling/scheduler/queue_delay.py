"""How long requests have waited that begin now: what tells a queue that stands from one that empties."""

from __future__ import annotations

from collections import deque

DELAY_WINDOW_S = 0.3


class QueueDelay:
    """The smallest waiting time of the sequences that began within DELAY_WINDOW_S, in seconds.

    A burst makes late sequences wait, but the first ones of a window hardly do. Where even the smallest waiting time is
    long, the queue stands (Nichols and Jacobson, Controlling Queue Delay, 2012).
    """

    def __init__(self) -> None:
        self._began: deque[tuple[float, float]] = deque()  # when, and after what time; times rise towards the end
        self._last = 0.0

    def began(self, now: float, waited: float) -> None:
        """Note that a sequence began at `now` after `waited` seconds."""
        while self._began and self._began[-1][1] >= waited:
            self._began.pop()
        self._began.append((now, waited))
        self._last = waited

    def smallest(self, now: float) -> float:
        """The smallest waiting time; of the last sequence that began if none did within the window."""
        while self._began and self._began[0][0] <= now - DELAY_WINDOW_S:
            self._began.popleft()
        return self._began[0][1] if self._began else self._last
