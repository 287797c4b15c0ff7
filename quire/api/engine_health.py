"""Whether the engine makes progress, judged by its messages."""

from __future__ import annotations

from quire.clock import Clock

STALLED_S = 30.0
"""Without news of progress for this long, in seconds, the engine counts as stuck."""


class EngineHealth:
    """When one engine last made progress; one that sends nothing makes none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_progress = clock.now()

    def record_progress(self, when: float) -> None:
        """The engine finished a step, or had nothing to do, at that time."""
        self._last_progress = max(self._last_progress, when)

    @property
    def progressing(self) -> bool:
        """Whether there was progress within the last STALLED_S."""
        return self._last_progress >= self._clock.now() - STALLED_S
