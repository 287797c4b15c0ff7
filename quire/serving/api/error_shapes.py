"""Errors in the shape that the clients of an endpoint expect: OpenAI's everywhere but under a few paths.

Owns which path has which shape. Whoever makes an error, a route or a middleware, makes OpenAI's.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
