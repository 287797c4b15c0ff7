"""Whether the engine is paused: what goes on meanwhile, and what waits for the resume.

Owns the pause. Knows nothing about commands and outputs.
"""

from __future__ import annotations

from typing import Literal, get_args

from quire.foundation.messages.to_engine import PauseMode
from quire.scheduling.scheduler.scheduler import Scheduler

PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
_RESUME = "the resume"


class Pausing:
    """The pause of one engine. New requests are taken meanwhile, and wait.

    Args:
        scheduler: Of the engine.

    Attributes:
        mode: How it is paused; empty if it is not.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held: list[int] = []  # requests that await the resume; some may be over
        self.mode: Literal["", PauseMode] = ""

    @property
    def paused(self) -> bool:
        """Whether a pause was asked for, and no resume since."""
        return bool(self.mode)

    @property
    def frozen(self) -> bool:
        """Whether no step may be planned at all."""
        return self.mode == "keep"

    @property
    def reached(self) -> bool:
        """Whether nothing runs any more."""
        going_on = not self.frozen and not self._scheduler.only_awaiting
        return self.paused and not self._scheduler.steps_in_flight and not going_on

    def pause(self, mode: PauseMode) -> list[int]:
        """Pause, or go on paused in another mode. Returns the requests that are to be aborted."""
        self.mode = mode
        if mode == "abort":
            return [request.id for request in self._scheduler.requests()]
        if mode == "wait":
            self._held += self._scheduler.hold_new(_RESUME)
        return []

    def awaits(self, request_id: int) -> tuple[str, ...]:
        """What a new request awaits because of the pause."""
        if not self.paused:
            return ()
        self._held.append(request_id)
        return (_RESUME,)

    def resume(self) -> None:
        """All go on."""
        self.mode = ""
        for request_id in self._held:
            self._scheduler.arrived(request_id, _RESUME)
        self._held.clear()
