"""Keeps requests away from a server at which they fail. What counts as a failure is decided elsewhere."""

from __future__ import annotations

from quire.foundation.clock import Clock


class CircuitBreaker:
    """Lets all requests pass while it is closed. Failures in a row open it, and for `open_s` seconds none passes; then
    one request passes, whose end decides.

    Args:
        threshold: Failures in a row that open it.
    """

    def __init__(self, threshold: int, open_s: float, clock: Clock) -> None:
        self._threshold = threshold
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._sent = 0
        self._trial: int | None = None  # the request whose end decides

    @property
    def is_open(self) -> bool:
        """Whether it keeps requests away, except the one that tries."""
        return self._opened_at is not None

    @property
    def passes(self) -> bool:
        """Whether a request may be sent now."""
        if self._opened_at is None:
            return True
        return self._trial is None and self._clock.now() - self._opened_at >= self._open_s

    def sending(self) -> int:
        """Count a request that is sent. Returns its number, for the methods that tell its end. While the breaker is
        open, the ends of requests that were sent before decide nothing."""
        self._sent += 1
        if self._opened_at is not None and self._trial is None:
            self._trial = self._sent
        return self._sent

    def succeeded(self, number: int) -> None:
        """The server has answered this request."""
        if self._decides(number):
            self._failures, self._opened_at, self._trial = 0, None, None

    def failed(self, number: int) -> None:
        """The server has not answered this request."""
        if not self._decides(number):
            return
        self._failures += 1
        if number == self._trial or self._failures >= self._threshold:
            self._opened_at = self._clock.now()
        self._trial = None

    def left(self, number: int) -> None:
        """This request's client went away before the end. If the request was to try, another one has to."""
        if number == self._trial:
            self._trial = None

    def _decides(self, number: int) -> bool:
        return self._opened_at is None or number == self._trial
