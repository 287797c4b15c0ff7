"""API keys: every route needs one, except a short list of public routes.

The decision uses the route that the router itself matches, never a rebuilt URL, so no header and no spelling of a path
gets around it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.caller import API_KEY
from quire.api.error_responses import error_response
from quire.errors import AuthenticationError

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
        self._digests = [_digest(key) for key in keys]
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
        key = _key(Headers(scope=scope))
        if not key:
            return False
        digest = _digest(key)
        found = False
        for known in self._digests:  # all of them: the time must not depend on which one is similar
            found |= hmac.compare_digest(known, digest)
        if found:
            scope.setdefault("state", {})[API_KEY] = digest
        return found


def _key(headers: Headers) -> str:
    """The key of a request; empty without one. Anthropic's clients send it in a header of its own."""
    if "authorization" not in headers:
        return headers.get("x-api-key", "").strip()
    scheme, _, key = headers["authorization"].partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
