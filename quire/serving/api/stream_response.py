"""A stream to a client that may disconnect at any time or read too slowly.

Every stream ends after the last choice or an error, and the request is closed however the connection ends. Output is
written by the callback that receives the engine's message, in the same turn of the event loop. The response's own task
runs only at the start, while the client's socket is full, and at the end. So a token costs no task switch and no timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import types
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.serving.api.auth import DIRECT_SEND
from quire.serving.api.error_responses import error_body, error_response, internal_error_body
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_work import run_until_disconnect
from quire.text.deltas import ChoiceDelta, SequenceDelta

logger = logging.getLogger(__name__)
EVENT_STREAM = "text/event-stream"
_KEEP_ALIVE = b": keep-alive\n\n"


class AnswerFormat(Protocol):
    """How one endpoint writes an answer: its body, or a stream. Made for one request; called in order."""

    media_type: str

    async def body(self) -> dict[str, Any]:
        """Wait for all output; returns the answer that is not streamed."""

    def delta(self, index: int, gained: ChoiceDelta) -> bytes:
        """The bytes that say what a choice has gained, its end included; may be empty."""

    def end(self) -> bytes:
        """The bytes behind the end of the last choice."""

    def error(self, body: dict[str, Any]) -> bytes:
        """The bytes in place of all that would follow. `body` is OpenAI's error."""


@dataclass
class StreamWriter:
    """Writes the stream of running choices: `head` at once, then output, until it is `finished`. Behind its first
    tokens, each choice is written whenever it has gained `interval` more, and at its end."""

    format: AnswerFormat
    choices: RequestChoices
    request_id: str
    head: bytes = b""
    interval: int = 1
    finished: bool = False
    _unwritten: dict[int, ChoiceDelta | None] = field(default_factory=dict)

    @property
    def media_type(self) -> str:
        return self.format.media_type

    async def wait(self) -> None:
        """Wait for output if the request has a deadline; raises a QuireError if the request failed before."""
        await self.choices.wait()

    def close(self) -> None:
        """Abort what still runs, because nobody reads any more."""
        self.choices.close()

    async def next(self, write_now: Callable[[bytes], bool]) -> bytes:
        """Wait for output, which `write_now` gets as soon as there is any; returns what it has not taken."""

        def on_delta(index: int, delta: SequenceDelta) -> bool:
            data = self._written(index, delta)
            return (not data or write_now(data)) and not self.finished

        if self.head:
            head, self.head = self.head, b""
            return head
        try:
            return b"".join([self._written(index, delta) for index, delta in await self.choices.read(on_delta)])
        except QuireError as error:
            return self._failed(error_body(error))
        except Exception:
            logger.exception("Request %s failed while it was streamed.", self.request_id)
            return self._failed(internal_error_body(self.request_id))

    def _failed(self, body: dict[str, Any]) -> bytes:
        self.finished = True
        return self.format.error(body)

    def _written(self, index: int, delta: SequenceDelta) -> bytes:
        """What a choice gained; after the last choice's end also the end of the stream."""
        gained = self.choices.process(index, delta)
        if gained is None or (self.interval > 1 and (gained := self._collected(index, gained)) is None):
            return b""
        data = self.format.delta(index, gained)
        if self.choices.finished:
            self.finished = True
            data += self.format.end()
        return data

    def _collected(self, index: int, gained: ChoiceDelta) -> ChoiceDelta | None:
        """What a choice has gained since it was last written; None if that is not enough yet."""
        before = self._unwritten.get(index)
        if before is not None:
            before.add(gained)
            gained = before
        is_first = index not in self._unwritten and bool(gained.tokens)
        if is_first or gained.finish_reason is not None or len(gained.tokens) >= self.interval:
            self._unwritten[index] = None
            return gained
        self._unwritten[index] = gained
        return None


class Writer(Protocol):
    """Makes a stream's bytes, as StreamWriter does for choices that are running."""

    @property
    def media_type(self) -> str: ...

    @property
    def finished(self) -> bool: ...

    async def wait(self) -> None: ...

    async def next(self, write_now: Callable[[bytes], bool]) -> bytes: ...

    def close(self) -> None: ...


class StreamResponse(Response):
    """Sends what a writer makes until it ends, or the client leaves or does not read for `slow_reader_s` seconds.

    A stream of events that has nothing to say for `keep_alive_s` seconds sends a comment, which clients pass over; 0
    for never.
    """

    def __init__(self, writer: Writer, slow_reader_s: float, keep_alive_s: float = 0.0) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=writer.media_type)
        del self.headers["content-length"]
        self._writer = writer
        self._slow_reader_s = slow_reader_s
        self._keep_alive_s = keep_alive_s if writer.media_type == EVENT_STREAM else 0.0
        self._silent = True  # since the last look
        self._pending_write: Awaitable[None] | None = None  # begun, but waits for the client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct_send: Send | None = scope["state"].get(DIRECT_SEND)
        write_now = partial(self._write_now, direct_send) if direct_send else partial(self._write_later, send)
        try:
            await run_until_disconnect(self._stream(send, direct_send or send, write_now), receive)
        except QuireError as error:
            await error_response(error)(scope, receive, send)
        except TimeoutError:
            logger.warning("Request %s was ended: its client does not read.", scope["state"]["request_id"])
        finally:
            self._writer.close()

    async def _stream(self, send: Send, direct_send: Send, write_now: Callable[[bytes], bool]) -> None:
        await self._wait()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while not self._writer.finished:
            data = await self._next(direct_send, write_now)
            async with asyncio.timeout(self._slow_reader_s):
                if self._pending_write is not None:
                    await self._pending_write
                    self._pending_write = None
                if data:
                    await direct_send(_body(data))
        await direct_send(_body(b"", more=False))

    async def _wait(self) -> None:
        """Wait for output if the request has a deadline, but not for longer than the client may wait."""
        if not self._keep_alive_s:
            await self._writer.wait()
            return
        with contextlib.suppress(TimeoutError):  # what fails later is an event of the stream
            await asyncio.wait_for(self._writer.wait(), self._keep_alive_s)

    async def _next(self, direct_send: Send, write_now: Callable[[bytes], bool]) -> bytes:
        """What the writer has next; meanwhile comments go out whenever nothing else did for a while."""
        if not self._keep_alive_s:
            return await self._writer.next(write_now)
        reading = asyncio.ensure_future(self._writer.next(write_now))
        try:
            while not (await asyncio.wait({reading}, timeout=self._keep_alive_s))[0]:
                if self._silent and self._pending_write is None:
                    async with asyncio.timeout(self._slow_reader_s):
                        await direct_send(_body(_KEEP_ALIVE))
                self._silent = True
            return reading.result()
        finally:
            reading.cancel()

    def _write_now(self, direct_send: Send, data: bytes) -> bool:
        """Begin to write; returns whether all was written without waiting."""
        self._silent = False
        self._pending_write = start_eagerly(direct_send(_body(data)))
        return self._pending_write is None

    def _write_later(self, send: Send, data: bytes) -> bool:
        """Leave the write to the response's task, which an operator's own middleware may need."""
        self._silent = False
        self._pending_write = send(_body(data))
        return False


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def start_eagerly(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run a coroutine up to its first suspension. Returns None if it has finished; else the rest of it, to be awaited
    in a task.

    An ASGI server's `send` suspends only while the socket's buffer is full. A callback has no task to await it in, and
    a new task would cost a turn of the event loop for each token. So this does what a task does first: it asks the
    coroutine for the first future that it waits for. (Python 3.12's asyncio has this as `eager_start`.)
    """
    steps = work.__await__()
    try:
        future = next(steps)
    except StopIteration:
        return None
    return _finish(future, steps)


@types.coroutine
def _finish(future: Any, steps: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    """Wait for the future on which the coroutine was suspended, then run the rest of the coroutine."""
    try:
        yield future  # the awaiting task goes on behind this line when the future is done
    except BaseException:  # that task was cancelled
        steps.close()
        raise
    yield from steps
