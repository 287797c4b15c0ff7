"""API keys: every route needs one, except a short list of public routes.

The decision uses the route that the router itself matches, never a rebuilt URL, so no header and no spelling of a path
gets around it.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import AuthenticationError
from quire.serving.api.api_keys import digest_of, find_digest, given_key
from quire.serving.api.caller import API_KEY
from quire.serving.api.error_responses import error_response
from quire.serving.api.request_headers import request_header

PUBLIC = frozenset({
    "/",
    "/health",
    "/ready",
    "/ping",
    "/version",
    "/load",
    "/metrics",
    "/docs",
    "/docs/files/{name}",
    "/page/{version}/{name}",
    "/redoc",
    "/openapi.json",
})  # fmt: skip


class AuthenticationMiddleware:
    """ASGI middleware that answers 401 without a valid key."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], routes: Sequence[BaseRoute]) -> None:
        """
        Args:
            app: What runs inside.
            keys: Any of them is valid; if there are none, no key is needed.
            routes: The router's; read at each request.
        """
        self._app = app
        self._digests = [digest_of(key) for key in keys]
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._digests or self._has_key(scope) or self._is_public(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        error = AuthenticationError("A valid API key is needed: send it as the header 'Authorization: Bearer KEY'.")
        await error_response(error)(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return getattr(route, "path", None) in PUBLIC
        return False

    def _has_key(self, scope: Scope) -> bool:
        key = given_key(request_header(scope, b"authorization"), request_header(scope, b"x-api-key"))
        if not key:
            return False
        digest = digest_of(key)
        found = find_digest(digest, self._digests) is not None
        if found:
            scope.setdefault("state", {})[API_KEY] = digest
        return found
