"""Limits the size of request bodies."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.error_responses import error_response
from quire.errors import PayloadTooLarge


class BodyLimitMiddleware:
    """ASGI middleware that answers 413, from the Content-Length or, without one, as soon as too much was read."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdigit() or int(announced) > self._max:
            await error_response(self._too_large())(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The request body is larger than the {self._max} bytes that this server reads.")
