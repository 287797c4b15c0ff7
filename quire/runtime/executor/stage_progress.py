"""Finds the pipeline stage that keeps the others waiting. Within a stage, ranks find that out themselves."""

from __future__ import annotations

from typing import NamedTuple

from quire.compute.mesh import Mesh
from quire.foundation.clock import Clock
from quire.foundation.messages.workers import Plan

PATIENCE_S = 60.0
"""How long a stage may take for a step by default."""


class Stuck(NamedTuple):
    """A rank that the others have waited for in a step, and for how long."""

    rank: int
    step: int
    seconds: float


class StageProgress:
    """Follows how far each rank is. A `patience_s` of None means PATIENCE_S."""

    def __init__(self, mesh: Mesh, patience_s: float | None, clock: Clock) -> None:
        self._clock = clock
        self._patience_s = patience_s or PATIENCE_S
        self._is_divided = mesh.pp > 1
        self._done = [0] * mesh.size
        self._submitted = 0
        self._masked: set[int] = set()  # steps that wait for bitmasks
        self._since = clock.now()

    def submitted(self, plan: Plan) -> None:
        """The engine has sent a plan."""
        if min(self._done) == self._submitted:
            self._since = self._clock.now()
        self._submitted = plan.step
        if plan.masked:
            self._masked.add(plan.step)

    def unmasked(self, step: int) -> None:
        """The engine has sent the step's bitmasks."""
        self._masked.discard(step)
        self._since = self._clock.now()

    def done(self, rank: int, step: int) -> None:
        """A rank has done its part of a step."""
        self._done[rank] = step
        self._since = self._clock.now()

    def stuck(self) -> Stuck | None:
        """The rank that all others have waited for too long: the first of those that have done least, which needs
        nothing from any other."""
        least = min(self._done)
        seconds = self._clock.now() - self._since
        if not self._is_divided or least == self._submitted or self._masked or seconds < self._patience_s:
            return None
        return Stuck(self._done.index(least), least + 1, self._patience_s)
