"""Failures as OpenAI error bodies, and in the shape of other APIs under a few paths.

Owns status, headers and wording of error responses, and which path has which shape. Whoever makes an error, a route or
a middleware, makes OpenAI's. Details of unexpected failures go to the log only.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import OverloadedError, QuireError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = "5"
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    503: "overloaded_error",
}
_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
"""Of errors about a field: with these Anthropic's SDKs send the conversation without it."""


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


class ErrorShapeMiddleware:
    """ASGI middleware that writes error bodies anew for other APIs than OpenAI's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_own_shape(scope["path"]):
            await self._app(scope, receive, send)
            return
        begun: Message | None = None  # of an error
        body = b""

        async def reshaped(message: Message) -> None:
            nonlocal begun, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                begun = message
                return
            if begun is None:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                content = _shaped(scope, begun["status"], body)
                MutableHeaders(scope=begun)["content-length"] = str(len(content))
                await send(begun)
                await send({"type": "http.response.body", "body": content})

        await self._app(scope, receive, reshaped)


def _has_own_shape(path: str) -> bool:
    return path.startswith(("/v1/messages", "/api/"))


def _shaped(scope: Scope, status: int, body: bytes) -> bytes:
    try:
        error: dict[str, Any] = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body  # no error of ours
    if scope["path"].startswith("/api/"):  # Ollama's
        return msgspec.json.encode({"error": error["error"]["message"]})
    return msgspec.json.encode(anthropic_error(status, error, scope["state"]["request_id"]))


def anthropic_error(status: int, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Anthropic's error for OpenAI's."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": body["error"]["message"]}
    if (details := _DETAILS.get(body["error"].get("param") or "")) is not None:
        error["details"] = details
    return {"type": "error", "error": error, "request_id": request_id}
