"""Whether the engine lives and moves, judged by what was heard of it."""

from __future__ import annotations

from quire.clock import Clock

STALLED_S = 30.0
"""Without a sign of life, or of progress, for this long the engine counts as stuck."""


class Liveness:
    """The last sign of life and the last progress of one engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard = self._progress = clock.now()

    def heard(self) -> float:
        """A message came; returns when: now."""
        self._heard = self._clock.now()
        return self._heard

    def moved(self, when: float) -> None:
        """The engine finished a step, or had nothing to do, at that time."""
        self._progress = max(self._progress, when)

    @property
    def moves(self) -> bool:
        """Whether it was heard of, and moved, not too long ago."""
        return min(self._heard, self._progress) >= self._clock.now() - STALLED_S
