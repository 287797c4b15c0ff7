"""One connection to a server: a request out, its answer in, as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from quire.foundation.http_client.http1 import AnswerHead, AnswerParser, HttpError, HttpTimeout

HIGH_WATER = 256 * 2**10
"""Bytes held for a caller that reads slowly; beyond that the server has to wait."""
OnBody = Callable[[bytes], None]
"""Called with each part of an answer's body as it arrives, in the event loop."""


class Connection(asyncio.Protocol):
    """A connection with at most one request at a time. `on_closed` is called once when it can no longer be used.

    `idle_since` is the loop's time at which its last answer was read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_closed: Callable[[Connection], None]) -> None:
        self._loop = loop
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._answer: AnswerParser | None = None  # to the request that is on its way
        self._on_body: OnBody | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_s: float | None = None
        self._last_byte = 0.0
        self._paused = self._closed = self._has_byte = self._given_up = False
        self.idle_since = 0.0

    def request(self, data: bytes, timeout_s: float | None, on_body: OnBody | None = None) -> None:
        """Send a request; `head` and `read` return its answer. The answer's head has to be complete after `timeout_s`
        seconds, and no silence may be longer; None for no limit. With `on_body`, which gets the body in place of
        `read`, `head` waits for the whole answer; what `on_body` raises ends the request."""
        assert self._transport is not None
        assert self._answer is None
        self._answer = AnswerParser()
        self._on_body = on_body
        self._has_byte = False
        self._timeout_s = timeout_s
        self._last_byte = self._loop.time()
        if timeout_s is not None:
            self._timer = self._loop.call_later(timeout_s, self._on_timer)
        self._transport.write(data)

    async def head(self) -> AnswerHead:
        """The answer's head; raises HttpError if none comes."""
        assert self._answer is not None
        while self._answer.head is None or (self._on_body is not None and not self._answer.complete):
            await self._more()
        return self._answer.head

    async def read(self) -> bytes:
        """The next part of the body, empty at its end; raises HttpError if the rest does not come."""
        assert self._answer is not None
        while not self._answer.held:
            if self._answer.complete:
                return b""
            await self._more()
        data = self._answer.take()
        if self._paused:
            assert self._transport is not None
            self._paused = False
            self._last_byte = self._loop.time()  # the server was told to wait until now
            self._transport.resume_reading()
        return data

    @property
    def reusable(self) -> bool:
        transport, answer = self._transport, self._answer
        if transport is None or transport.is_closing() or self._error is not None or self._closed:
            return False
        return answer is None or (answer.complete and answer.keep_alive and not transport.get_write_buffer_size())

    @property
    def waiting(self) -> bool:
        """Whether a request was sent, and no byte of its answer has come."""
        return self._answer is not None and not self._has_byte and self._error is None

    @property
    def was_closed_unused(self) -> bool:
        """Whether the server closed it before a byte of the answer, as it may do with a connection that was idle."""
        return self._closed and not self._has_byte and not self._given_up

    def finish(self) -> None:
        """Free the connection, because the answer was read."""
        self._answer = None
        self._stop_timer()
        self.idle_since = self._loop.time()

    def abort(self) -> None:
        """Close it at once, whatever is on its way, so the server sees that its client is gone."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: Exception) -> None:
        """Give up the request that is on its way."""
        self._given_up = True
        if self._error is None:
            self._error = error
        self.abort()
        self._wake()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without being an instance

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        self._has_byte = True
        try:
            if self._answer is None:
                raise HttpError("It sent what it was not asked for.")
            self._answer.feed(data)
            if self._on_body is not None and self._answer.held:
                self._on_body(self._answer.take())
        except Exception as error:
            self.fail(error)
            return
        if self._answer.head is not None:  # a head in many small parts gets no more time than a whole one
            self._last_byte = self._loop.time()
        if self._answer.held > HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self._on_body is None or self._answer.complete:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._stop_timer()
        if self._answer is not None and self._error is None:
            try:
                if exc is not None and not self._answer.complete:
                    raise HttpError(f"The connection broke: {exc}.")
                self._answer.end()
            except HttpError as error:
                self._error = error
        self._wake()
        self._on_closed(self)

    async def _more(self) -> None:
        """Wait until something has happened; raises HttpError if nothing more will come."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_timer(self) -> None:
        """Look how long ago the last byte came. There is one timer for the whole answer."""
        assert self._timeout_s is not None
        left = self._timeout_s if self._paused else self._last_byte + self._timeout_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._on_timer)
            return
        self._timer = None
        self.fail(HttpTimeout(f"It sent nothing for {self._timeout_s:g} s."))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
