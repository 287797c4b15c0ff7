"""Time as something that is given, so that a test or a simulation can hand in its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where code asks for the time."""

    def now(self) -> float:
        """Seconds on a monotonic clock that all processes of this machine share."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary point, the same for all processes of this machine."""
        return time.monotonic()


class WallClock:
    """The time of day, for what outlives the machine's uptime."""

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()
