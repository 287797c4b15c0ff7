"""Which pages of other origins a browser lets read answers: Starlette's CORS, for requests that name an origin."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.foundation.config import ServerConfig
from quire.serving.api.request_head import HEADER, request_header

DROPPED_TOOLS = "x-quire-dropped-tools"
"""Response header: types of hosted tools that were left out."""
_VARY = (b"vary", b"Origin")


class CrossOriginMiddleware:
    """ASGI middleware.

    Args:
        app: What runs inside.
        config: Names what is allowed.
    """

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
