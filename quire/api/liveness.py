"""Whether the engine moves, judged by what was heard of it."""

from __future__ import annotations

from quire.clock import Clock

STALLED_S = 30.0
"""Without news of progress for this long the engine counts as stuck."""


class Liveness:
    """The last progress of one engine; one that falls silent makes none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._progress = clock.now()

    def moved(self, when: float) -> None:
        """The engine finished a step, or had nothing to do, at that time."""
        self._progress = max(self._progress, when)

    @property
    def moves(self) -> bool:
        """Whether it moved not too long ago."""
        return self._progress >= self._clock.now() - STALLED_S
