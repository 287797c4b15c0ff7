"""Middleware of an operator's own, for test_vllm_settings.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NO_MIDDLEWARE = 5


class Stamp:
    """Counts the bytes of all bodies, and says in a header that it was here."""

    size = 0

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"class")]
            elif message["type"] == "http.response.body":
                Stamp.size += len(message["body"])
            await send(message)

        await self._app(scope, receive, stamped)


async def gate(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Turns some requests away."""
    if request.headers.get("x-closed"):
        return JSONResponse({"closed": True}, 418)
    return await call_next(request)
