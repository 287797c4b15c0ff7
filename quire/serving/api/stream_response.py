"""A stream to a client that may disconnect at any time or read too slowly.

Owns the connection: however it ends, the request is closed. Output is written by the callback that receives the
engine's message, in the same turn of the event loop. The response's own task runs only at the start, while the
client's socket is full, and at the end. So a token costs no task switch and no timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import QuireError
from quire.serving.api.disconnect import run_until_disconnect
from quire.serving.api.eager_start import start_eagerly
from quire.serving.api.error_responses import error_response

logger = logging.getLogger(__name__)

DIRECT_SEND = "direct_send"
"""Key in the scope's state: the server's own `send`, see DirectSendMiddleware."""


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


class DirectSendMiddleware:
    """ASGI middleware, the outermost, that keeps the server's own `send` for bodies that come in many parts.

    Other middleware wraps `send` to see how a response begins. To pass each part of its body through all of them would
    cost as much as making it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})[DIRECT_SEND] = send
        await self._app(scope, receive, send)


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
