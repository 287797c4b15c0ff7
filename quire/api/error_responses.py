"""Failures as OpenAI error bodies.

Owns status, headers and wording of error responses. Details of unexpected failures go to the log only.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import OverloadedError, QuireError, RequestError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = "5"
_HTTP_MESSAGES = {
    404: "There is no such route. GET /docs lists all of them.",
    405: "This route does not take this method. GET /docs lists all routes.",
}


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
    return _response(error.status, error_body(error), headers)


def internal_error_body(request_id: str) -> dict[str, Any]:
    """What a client sees of an unexpected failure: the request id, to ask the operator about."""
    message = f"Something failed inside the server. Its log has the details under request id {request_id}."
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "internal_error"}}


def add_error_handlers(app: FastAPI) -> None:
    """Let every error that a route raises leave in this shape."""

    async def on_quire_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, QuireError)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = _HTTP_MESSAGES.get(error.status_code, error.detail)
        kind = "not_found_error" if error.status_code == 404 else RequestError.type
        body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        return _response(error.status_code, body, dict(error.headers or {}))

    async def on_wrong_query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        wrong = error.errors()[0]
        name = str(wrong["loc"][-1])[:64]
        what = wrong["msg"].removeprefix("Input should be ")
        return error_response(RequestError(f"{name} must be {what}.", param=name))

    app.add_exception_handler(QuireError, on_quire_error)
    app.add_exception_handler(RequestValidationError, on_wrong_query)
    app.add_exception_handler(HTTPException, on_http_error)


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
                await _response(500, internal_error_body(request_id), {})(scope, receive, send)


def _response(status: int, body: dict[str, Any], headers: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
