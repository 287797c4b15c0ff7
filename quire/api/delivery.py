"""Getting an answer to a client that may leave at any time or read too slowly.

Owns watching the connection. Whatever way it ends, the generation is given back. A stream's events are written in the
moment in which the engine's message brings them, by whoever brings it; the stream's own task runs only while its client
does not take them, and at its end. So a token costs no switch of tasks and no timer.
"""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.events import EventWriter

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
BODY_SEND = "body_send"
"""In the scope's state: see BodyPath."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes, or, when the client leaves first, one that nobody reads; `work` is cancelled
    then."""
    making = asyncio.ensure_future(work)
    return await _first(making, request.receive) or Response(status_code=CLIENT_LEFT)


class EventStream(Response):
    """Server-sent events, until they end, the client leaves, or it stops reading."""

    media_type = "text/event-stream"

    def __init__(self, events: EventWriter, close: Callable[[], None], slow_reader_s: float) -> None:
        """
        Args:
            events: What is written.
            close: Called in any case, at the end.
            slow_reader_s: How long the client may take nothing.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._slow_reader_s = slow_reader_s
        self._begun: Awaitable[None] | None = None  # a write that waits for the client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await _first(asyncio.ensure_future(self._write(send, scope["state"].get(BODY_SEND, send))), receive)
        except TimeoutError:
            logger.warning("Request %s was ended: its client does not read.", scope["state"]["request_id"])
        finally:
            self._close()

    async def _write(self, send: Send, send_body: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        at_once = partial(self._at_once, send_body)
        while not self._events.finished or self._begun is not None:
            data = await self._events.news(at_once) if self._begun is None else b""
            async with asyncio.timeout(self._slow_reader_s):
                if self._begun is not None:
                    await self._begun
                    self._begun = None
                if data:
                    await send_body(_piece(data))
        await send_body(_piece(b"", more=False))

    def _at_once(self, send_body: Send, data: bytes) -> bool:
        """Write what can be written without waiting; whether that was all."""
        self._begun = _begin(send_body(_piece(data)))
        return self._begun is None


class BodyPath:
    """ASGI layer, the outermost one, that leaves the server's own `send` for bodies that come in many pieces.

    Layers are interested in how an answer begins. To pass each piece of its body through all of them costs as much as
    to make it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            scope.setdefault("state", {})[BODY_SEND] = send
        await self._app(scope, receive, send)


def _piece(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _begin(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run a coroutine up to where it first has to wait; returns the rest of it, if there is any."""
    steps = work.__await__()
    try:
        awaited = next(steps)
    except StopIteration:
        return None
    return _rest(awaited, steps)


@types.coroutine
def _rest(awaited: Any, steps: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    try:
        yield awaited
    except BaseException:
        steps.close()
        raise
    yield from steps


async def _first(work: asyncio.Future[Any], receive: Receive) -> Any:
    """The result of `work`, or None when the client leaves before there is one."""
    leaving = asyncio.ensure_future(_gone(receive))
    both = (work, leaving)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
