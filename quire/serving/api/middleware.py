"""Small ASGI middleware: pages of other origins, and the size of bodies."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import OverloadedError, PayloadTooLarge
from quire.foundation.config import ServerConfig
from quire.serving.api.auth import HEADER, request_header
from quire.serving.api.error_responses import error_response

DROPPED_TOOLS = "x-quire-dropped-tools"
"""Response header: types of hosted tools that were left out."""
_VARY = (b"vary", b"Origin")
SMALL_BYTES = 2**20
"""A body that is no larger is read, whatever others hold."""
HELD_BODIES = 64
"""Bodies of the largest size that may be held together, each for as long as its request lasts."""
RETRY_S = 5


class CrossOriginMiddleware:
    """Starlette's CORS for requests that name an origin; other answers only say that they depend on it."""

    def __init__(self, app: ASGIApp, *, config: ServerConfig) -> None:
        self._app = app
        self._cors = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=[HEADER, DROPPED_TOOLS],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or request_header(scope, b"origin") is not None:
            await self._cors(scope, receive, send)
            return

        async def with_vary(message: Message) -> None:
            """A cache may not give this answer to a browser, which would get other headers."""
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), _VARY]
            await send(message)

        await self._app(scope, receive, with_vary)


class BodyLimitMiddleware:
    """Answers 413 by the Content-Length or, without one, as soon as too much was read; and 429 to a large body while
    others hold too much. `larger` has other limits by path, where bodies are not held but stored as they come."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, larger: Mapping[str, int] | None = None) -> None:
        self._app = app
        self._max = max_bytes
        self._larger = larger or {}
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._larger.get(scope["path"], self._max)
        announced = request_header(scope, b"content-length")
        if announced is not None and (not announced.isdigit() or int(announced) > most):
            await error_response(_too_large(most))(scope, receive, send)
            return
        seen, holds = 0, scope["path"] not in self._larger

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            size = len(message.get("body", b""))
            seen += size
            self._held += size * holds
            if seen > most:
                raise _too_large(most)
            if holds and seen > SMALL_BYTES and self._held > HELD_BODIES * self._max:
                raise OverloadedError(
                    f"The server holds too many large requests. Send it again in {RETRY_S} s.", retry_after_s=RETRY_S
                )
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= seen * holds


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is larger than the {most} bytes that this server reads.")
