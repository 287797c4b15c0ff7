"""Limits the size of request bodies."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.error_responses import error_response
from quire.errors import PayloadTooLarge


class BodyLimitMiddleware:
    """ASGI middleware that answers 413, from the Content-Length or, without one, as soon as too much was read."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, larger: Mapping[str, int] | None = None) -> None:
        """
        Args:
            app: What runs inside.
            max_bytes: Of a body.
            larger: Other limits, by path.
        """
        self._app = app
        self._max = max_bytes
        self._larger = larger or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._larger.get(scope["path"], self._max)
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdigit() or int(announced) > most:
            await error_response(_too_large(most))(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > most:
                raise _too_large(most)
            return message

        await self._app(scope, counted, send)


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is larger than the {most} bytes that this server reads.")
