"""A name for each request: the client's own X-Request-Id if it is a decent one, else a random one."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
_DECENT = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestIdMiddleware:
    """ASGI layer: `scope["state"]["request_id"]`, and the header on the answer."""

    def __init__(self, app: ASGIApp, *, always_answer: bool) -> None:
        """
        Args:
            app: What runs inside.
            always_answer: Send the header also where the request brought none.
        """
        self._app = app
        self._always = always_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        own = _DECENT.fullmatch(given) is not None
        request_id = given if own else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start" and (own or self._always):
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, named)
