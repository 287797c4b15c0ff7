"""Which processes are alive and make no progress, and how often dead ones may be replaced. Ends no process itself.

A watchdog goes by what a process reports and what the kernel says of it. Time counts in ticks, so nobody is blamed when
the whole machine or this process stood still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from quire.foundation.clock import Clock
from quire.foundation.processes.child_process import process_state
from quire.foundation.processes.launch import Pulse

TICK_S = 0.5
STOPPED_S = 1.5
"""Seconds that a process may be stopped (SIGSTOP)."""
SILENT_S = 20.0
"""Seconds that a process may report nothing. Its loop does one thing after the other, and some take seconds."""
WINDOW_S = 600.0
"""Seconds after which a death no longer counts."""
MAX_SEARCH = 16
"""Maximum number of deaths in a row that do not count, while the request that causes them is searched. A single request
takes two."""


class Watchdog:
    """Watches one process from its first pulse on. `state` gives the state of a process by its pid."""

    def __init__(self, pid: int, clock: Clock, state: Callable[[int], str] = process_state) -> None:
        self._pid = pid
        self._clock = clock
        self._state = state
        self._last_look = clock.now()
        self._pulse: Pulse | None = None
        self._silent_s = self._stopped_s = 0.0

    def heard(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._silent_s = 0.0

    def complaint(self) -> str:
        """Why the process counts as stuck; empty if it does not. Call this every TICK_S."""
        now = self._clock.now()
        passed, self._last_look = min(now - self._last_look, 2 * TICK_S), now
        if self._pulse is None:
            return ""  # it is starting, which takes as long as it takes
        self._silent_s += passed
        self._stopped_s = self._stopped_s + passed if self._state(self._pid) == "T" else 0.0
        if self._stopped_s >= STOPPED_S:
            return "it was stopped by SIGSTOP"
        if self._silent_s >= SILENT_S:
            return f"it was stuck: nothing was heard for {self._silent_s:.0f} s"
        if self._pulse.stalled_s > self._pulse.limit_s > 0:
            return f"it was stuck: a step took more than {self._pulse.limit_s:.1f} s"
        return ""


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

        A death with requests that were in flight at a death before (`again`) does not count: one of them may kill
        engines, and fails when it does so alone. `failed_starts` in a row count however long each took: otherwise ranks
        that load for too long would be started again for ever.
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
