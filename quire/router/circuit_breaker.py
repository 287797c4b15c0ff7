"""Keeps requests away from a server at which they fail. Knows nothing about what a failure is."""

from __future__ import annotations

from quire.clock import Clock


class CircuitBreaker:
    """Closed, it lets all pass; opened by failures in a row, none for some time; then one, whose end decides.

    Args:
        threshold: Failures in a row that open it.
        open_s: How long nothing passes.
        clock: For that.
    """

    def __init__(self, threshold: int, open_s: float, clock: Clock) -> None:
        self._threshold = threshold
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether it keeps requests away, the one that tries aside."""
        return self._opened_at is not None

    @property
    def passes(self) -> bool:
        """Whether a request may be sent now."""
        if self._opened_at is None:
            return True
        return not self._trying and self._clock.now() - self._opened_at >= self._open_s

    def sending(self) -> None:
        """A request is sent."""
        self._trying = self._opened_at is not None

    def succeeded(self) -> None:
        """A server has answered."""
        self._failures, self._opened_at, self._trying = 0, None, False

    def failed(self) -> None:
        """A server has not."""
        self._failures += 1
        if self._trying or self._failures >= self._threshold:
            self._opened_at = self._clock.now()
        self._trying = False

    def left(self) -> None:
        """The client went away before it could be told: another request has to try."""
        self._trying = False
