"""An id for each request: the client's own if it sends a valid one, in a header or in the body, else a random one."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import RequestError
from quire.serving.api.request_headers import request_header

HEADER = "X-Request-Id"
_NAME = HEADER.lower().encode()
_RANDOM_BYTES = 16
_VALID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestIdMiddleware:
    """ASGI middleware: sets `scope["state"]["request_id"]`, and the header of the response."""

    def __init__(self, app: ASGIApp, *, always_answer: bool) -> None:
        """
        Args:
            app: What runs inside.
            always_answer: Send the header also when the request brought none.
        """
        self._app = app
        self._always = always_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = request_header(scope, _NAME) or ""
        own = _VALID.fullmatch(given) is not None
        state = scope.setdefault("state", {})
        state["request_id"] = given if own else secrets.token_hex(_RANDOM_BYTES)

        async def with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and (own or self._always):
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            await send(message)

        await self._app(scope, receive, with_header)


def use_request_id(request: Request, given: str | None) -> None:
    """Take the id of the body's `request_id`. That of the header goes first, as in vLLM.

    Raises:
        RequestError: It has other characters than ids may have, or too many.
    """
    if given is None:
        return
    if not _VALID.fullmatch(given):
        raise RequestError("request_id must have 1 to 128 letters, digits or characters of '._:-'.", param="request_id")
    if not _VALID.fullmatch(request.headers.get(HEADER, "")):
        request.state.request_id = given
