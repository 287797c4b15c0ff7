"""Getting an answer to a client that may leave at any time or read too slowly.

Owns watching the connection. Whatever way it ends, the generation is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes, or, when the client leaves first, one that nobody reads; `work` is cancelled
    then."""
    making = asyncio.ensure_future(work)
    return await _first(making, request.receive) or Response(status_code=CLIENT_LEFT)


class EventStream(Response):
    """Server-sent events, until they end, the client leaves, or it stops reading."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], slow_reader_s: float) -> None:
        """
        Args:
            events: Encoded events.
            close: Called in any case, at the end.
            slow_reader_s: How long the client may take nothing.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._slow_reader_s = slow_reader_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await _first(asyncio.ensure_future(self._write(send)), receive)
        except TimeoutError:
            logger.warning("Request %s was ended: its client does not read.", scope["state"]["request_id"])
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            async with asyncio.timeout(self._slow_reader_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
