"""How long the pieces of work were that one thread did, in seconds of its own processor time."""

from __future__ import annotations

from quire.engine.metrics.histogram import Histogram
from quire.foundation.messages.from_engine import WORK_BOUNDS_S


class WorkTimes:
    """A histogram of pieces of work.

    Attributes:
        seconds: The histogram.
        longest: The longest piece so far.
    """

    def __init__(self) -> None:
        self.seconds = Histogram(WORK_BOUNDS_S)
        self.longest = 0.0

    def observe(self, seconds: float) -> None:
        """Count one piece."""
        self.seconds.observe(seconds)
        if seconds > self.longest:
            self.longest = seconds
