"""Failures as OpenAI error bodies, and in the shape of other APIs under a few paths. Details of unexpected failures go
to the log only."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import OverloadedError, QuireError, RequestError

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
"""Details of errors about a field: with these Anthropic's SDKs send the conversation without it."""
_WRONG_METHOD = "This route does not take this method. GET /docs lists all routes."
UNKNOWN = "There is no such route. GET /docs lists all of them."
_NOT_SERVED = "{path} is not served yet: this server answers in text. GET /docs lists all routes."
_OPERATORS = "{path} is there with --api-key, or in developer mode (VLLM_SERVER_DEV_MODE=1) only."
_ADAPTERS = (
    "{path} is there with --enable-lora and one of --api-key, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and developer mode "
    "(VLLM_SERVER_DEV_MODE=1) only."
)
_REASONS = {
    _OPERATORS: ("/server_info", "/reset_prefix_cache", "/pause", "/resume", "/is_paused", "/admin/model"),
    _ADAPTERS: ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    "{path} is there in developer mode (VLLM_SERVER_DEV_MODE=1) only.": ("/debug/counts",),
    "{path} is there with --enable-tokenizer-info-endpoint only.": ("/tokenizer_info",),
    "{path} is switched off by --disable-fastapi-docs.": ("/docs", "/redoc", "/openapi.json"),
    _NOT_SERVED: (
        "/v1/moderations", "/generative_scoring", "/v1/audio/speech", "/v1/images/generations", "/v1/images/edits",
        "/v1/realtime",
    ),
    "{path} is not served yet: end the server to free a GPU, or serve another model with POST /admin/model.": (
        "/sleep", "/wake_up", "/is_sleeping",
    ),
    "{path} is not served yet: POST /admin/model serves a directory with other weights.": (
        "/update_weights", "/init_weight_transfer_engine",
    ),
    "{path} is not served: quire bench measures kernels and steps.": ("/start_profile", "/stop_profile"),
    "{path} is not served: a request ends when its client closes the connection.": ("/abort_requests",),
    "{path} is not served: engines run none but their own code.": ("/collective_rpc",),
    "{path} is not served: an image with other settings never has the vectors of an earlier one. Leave it out.": (
        "/reset_mm_cache", "/reset_encoder_cache",
    ),
    "{path} is not served: the number of engines is chosen at the start (--data-parallel-size).": (
        "/scale_elastic_ep",
    ),
    "{path} is not served: the model is chosen at the start. POST /admin/model serves another one.": (
        "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete",
    ),
}  # fmt: skip
_REASON_OF = {path: reason for reason, paths in _REASONS.items() for path in paths}


def error_body(error: QuireError) -> dict[str, Any]:
    """The JSON that OpenAI's clients expect."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: QuireError) -> Response:
    """The whole answer to a request that failed."""
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


def json_answer(status: int, body: dict[str, Any], headers: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


class ErrorMiddleware:
    """ASGI middleware that turns unexpected exceptions into a 500 and a log entry, and writes error bodies anew for
    other APIs than OpenAI's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reshapes = scope["path"].startswith(("/v1/messages", "/api/"))
        started, body = False, b""
        begun: Message | None = None  # of an error that is written anew

        async def shaped(message: Message) -> None:
            nonlocal started, begun, body
            if message["type"] == "http.response.start":
                started = True
                if reshapes and message["status"] >= 400:
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

        try:
            await self._app(scope, receive, shaped)
        except Exception:
            request_id = scope["state"]["request_id"]
            logger.exception("Request %s failed.", request_id)
            if not started:
                await json_answer(500, internal_error_body(request_id), {})(scope, receive, shaped)


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


def http_error_response(error: HTTPException, path: str) -> Response:
    """The answer to a request of this path that the framework refuses."""
    messages = {404: absent_route_message(path), 405: _WRONG_METHOD}
    message = messages.get(error.status_code, error.detail)
    kind = "not_found_error" if error.status_code == 404 else RequestError.type
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return json_answer(error.status_code, body, dict(error.headers or {}))


def absent_route_message(path: str) -> str:
    """Why there is no route of this path here."""
    return _REASON_OF.get(path, UNKNOWN).format(path=path)
