"""Counts responses by route, method and status; probes are left out."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.metrics.server_stats import HttpCounts
from quire.foundation.clock import Clock
from quire.serving.api.disconnect import CLIENT_CLOSED_REQUEST

UNCOUNTED = frozenset({"/health", "/ping", "/ready", "/metrics", "/load", "/version"})


class HttpMetricsMiddleware:
    """ASGI middleware that fills HttpCounts."""

    def __init__(self, app: ASGIApp, *, counts: HttpCounts, clock: Clock) -> None:
        """
        Args:
            app: What runs inside.
            counts: Filled.
            clock: For durations.
        """
        self._app = app
        self._counts = counts
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNCOUNTED:
            await self._app(scope, receive, send)
            return
        began, status = self._clock.now(), CLIENT_CLOSED_REQUEST

        async def watch_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch_status)
        finally:
            handler = getattr(scope.get("route"), "path", None)
            self._counts.answered(scope["method"], handler, status, self._clock.now() - began)
