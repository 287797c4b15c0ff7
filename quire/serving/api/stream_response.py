"""A stream to a client that may disconnect at any time or read too slowly.

Owns the connection: however it ends, the request is closed. Owns also that every stream ends: after the last choice, or
after an error. Output is written by the callback that receives the engine's message, in the same turn of the event
loop. The response's own task runs only at the start, while the client's socket is full, and at the end. So a token
costs no task switch and no timer. Knows no format.
"""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.serving.api.error_responses import error_body, error_response, internal_error_body
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_head import DIRECT_SEND
from quire.serving.api.request_work import run_until_disconnect
from quire.text.deltas import ChoiceDelta, SequenceDelta

logger = logging.getLogger(__name__)


class AnswerFormat(Protocol):
    """How one endpoint writes an answer: its body, or a stream. Made for one request; called in order."""

    media_type: str

    async def body(self) -> dict[str, Any]:
        """The answer that is not streamed; waits for all of its output."""
        ...

    def delta(self, index: int, gained: ChoiceDelta) -> bytes:
        """What is written when a choice has gained something, its end included; may be empty."""
        ...

    def end(self) -> bytes:
        """What is written once the last choice has ended."""
        ...

    def error(self, body: dict[str, Any]) -> bytes:
        """What is written in place of all that would follow.

        Args:
            body: OpenAI's: `error` with `message`, `type`, `param` and `code`.
        """
        ...


@dataclass
class StreamWriter:
    """Writes one request's stream.

    Attributes:
        format: How it is written.
        choices: What is written.
        request_id: For the log.
        head: Written at once, before there is any output.
        finished: Whether the last of it was written.
    """

    format: AnswerFormat
    choices: RequestChoices
    request_id: str
    head: bytes = b""
    finished: bool = False

    @property
    def media_type(self) -> str:
        """Of the response."""
        return self.format.media_type

    async def wait(self) -> None:
        """Until it is known that the request is begun; at once for one without a deadline.

        Raises:
            QuireError: It failed before.
        """
        if self.choices.has_deadline:
            await self.choices.wait()

    def close(self) -> None:
        """Nobody reads any more: what still runs is aborted."""
        self.choices.close()

    async def next(self, write_now: Callable[[bytes], bool]) -> bytes:
        """Wait for output; returns what `write_now` has not taken, together.

        Args:
            write_now: Called with output as soon as there is any; returns whether it can take more.
        """

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
        """What a choice gained; after the end of the last choice also the end of the stream."""
        gained = self.choices.process(index, delta)
        if gained is None:
            return b""
        data = self.format.delta(index, gained)
        if self.choices.finished:
            self.finished = True
            data += self.format.end()
        return data


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
    """What a writer makes, until it ends, the client disconnects, or it stops reading."""

    def __init__(self, writer: Writer, slow_reader_s: float) -> None:
        """
        Args:
            writer: Makes the output; closed at the end in any case.
            slow_reader_s: How long a write may wait for the client.
        """
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=writer.media_type)
        del self.headers["content-length"]
        self._writer = writer
        self._slow_reader_s = slow_reader_s
        self._pending_write: Awaitable[None] | None = None  # begun, but waits for the client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct_send = scope["state"].get(DIRECT_SEND, send)
        try:
            await run_until_disconnect(self._stream(send, direct_send), receive)
        except QuireError as error:
            await error_response(error)(scope, receive, send)
        except TimeoutError:
            logger.warning("Request %s was ended: its client does not read.", scope["state"]["request_id"])
        finally:
            self._writer.close()

    async def _stream(self, send: Send, direct_send: Send) -> None:
        await self._writer.wait()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        write_now = partial(self._write_now, direct_send)
        while not self._writer.finished:
            data = await self._writer.next(write_now)
            async with asyncio.timeout(self._slow_reader_s):
                if self._pending_write is not None:
                    await self._pending_write
                    self._pending_write = None
                if data:
                    await direct_send(_body(data))
        await direct_send(_body(b"", more=False))

    def _write_now(self, direct_send: Send, data: bytes) -> bool:
        """Begin to write; returns whether all was written without waiting."""
        self._pending_write = start_eagerly(direct_send(_body(data)))
        return self._pending_write is None


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def start_eagerly(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run a coroutine right here up to its first suspension.

    An ASGI server's `send` is a coroutine, but it suspends only while the socket's buffer is full; nearly always it
    writes and returns. A callback has no task to await it in, and a new task would cost a turn of the event loop for
    each token. So this does by hand what a task does first: it asks the coroutine for the first future that it waits
    for. (From Python 3.12 on asyncio has this as `eager_start`.)

    Returns:
        None if the coroutine has finished; else the rest of it, to be awaited in a task.
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
