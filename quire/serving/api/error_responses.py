"""Failures as OpenAI error bodies.

Owns status, headers and wording of error responses. Details of unexpected failures go to the log only.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import OverloadedError, QuireError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = "5"


def error_body(error: QuireError) -> dict[str, Any]:
    """The JSON that OpenAI's clients expect."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: QuireError) -> Response:
    """The whole answer."""
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 503:
        headers["Retry-After"] = RETRY_AFTER_S
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_answer(error.status, error_body(error), headers)


def internal_error_body(request_id: str) -> dict[str, Any]:
    """What a client sees of an unexpected failure: the request id, to ask the operator about."""
    message = f"Something failed inside the server. Its log has the details under request id {request_id}."
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "internal_error"}}


class ServerErrorMiddleware:
    """ASGI middleware that turns any other exception into a 500 and a log entry."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            request_id = scope["state"]["request_id"]
            logger.exception("Request %s failed.", request_id)
            if not started:
                await json_answer(500, internal_error_body(request_id), {})(scope, receive, send)


def json_answer(status: int, body: dict[str, Any], headers: dict[str, str]) -> Response:
    """An answer with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
