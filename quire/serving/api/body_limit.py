"""Limits the size of request bodies, of each and of all together."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import OverloadedError, PayloadTooLarge
from quire.serving.api.error_responses import error_response
from quire.serving.api.request_head import request_header

SMALL_BYTES = 2**20
"""A body that is no larger is read, whatever others hold."""
HELD_BODIES = 64
"""Of the largest size: so much may be held together, for as long as their requests last."""
RETRY_S = 5


class BodyLimitMiddleware:
    """ASGI middleware that answers 413, from the Content-Length or, without one, as soon as too much was read; and 429
    to a large body while others hold too much."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, larger: Mapping[str, int] | None = None) -> None:
        """
        Args:
            app: What runs inside.
            max_bytes: Of a body.
            larger: Other limits, by path; there, bodies are not held but stored as they come.
        """
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
