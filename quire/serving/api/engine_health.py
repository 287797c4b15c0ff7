"""Whether the engine makes progress, judged by its messages."""

from __future__ import annotations

from quire.foundation.clock import Clock
from quire.foundation.messages.from_engine import Heartbeat

SILENT_S = 5.0
"""An engine that is not heard for so long, in seconds, is not well: it has a heartbeat every second."""
RED_AT = 0.5
"""A step that takes this share of the time after which the engine counts as stuck is one to worry about."""


class EngineHealth:
    """What one engine's messages say about it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._beat: Heartbeat | None = None

    def record_heartbeat(self, beat: Heartbeat) -> None:
        """A heartbeat came."""
        self._beat = beat

    def record_progress(self) -> None:
        """A step brought something, or another engine is ready."""
        self._beat = None

    def complaint(self, heard_at: float | None) -> str:
        """What is wrong, or nothing.

        Args:
            heard_at: When any message came last.
        """
        if heard_at is not None and (silent := self._clock.now() - heard_at) > SILENT_S:
            return f"the engine has not been heard for {silent:.0f} s"
        if self._beat is not None:
            stalled = self._beat.now - self._beat.last_progress
            if stalled > RED_AT * self._beat.limit_s:
                return (
                    f"a step of the engine takes {stalled:.0f} s by now; after {self._beat.limit_s:.0f} s it is stuck"
                )
        return ""
