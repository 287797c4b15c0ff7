"""Finds processes that are alive and make no progress, from what they report and what the kernel says of them.

Time counts in ticks, so nobody is blamed when the whole machine or this process stood still.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.foundation.clock import Clock
from quire.foundation.processes.child_process import process_state
from quire.foundation.processes.launch import Pulse

TICK_S = 0.5
STOPPED_S = 1.5
"""Seconds that a process may be stopped (SIGSTOP)."""
SILENT_S = 20.0
"""Seconds that a process may report nothing. Its loop does one thing after the other, and some take seconds."""


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
