"""What a route raises, or what no route takes, as the server's answer.

Owns the application's handlers, and what a 404 says of a path that a user has reason to ask for: which flag adds its
route, or that it is not served. The answers are `error_responses`.
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import QuireError, RequestError
from quire.serving.api.error_responses import error_response, json_answer

_WRONG_METHOD = "This route does not take this method. GET /docs lists all routes."
UNKNOWN = "There is no such route. GET /docs lists all of them."
_NOT_SERVED = "{path} is not served yet: this server generates text. GET /docs lists all routes."
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
    "Embeddings are not served yet. GET /docs lists all routes.": (
        "/v1/embeddings", "/v2/embed", "/api/embed", "/api/embeddings",
    ),
    _NOT_SERVED: (
        "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify", "/v1/moderations",
        "/generative_scoring", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
        "/v1/images/generations", "/v1/images/edits", "/v1/realtime",
    ),
    "{path} is not served yet. GET /docs lists all routes.": (
        "/sleep", "/wake_up", "/is_sleeping", "/start_profile", "/stop_profile", "/abort_requests", "/collective_rpc",
        "/reset_mm_cache", "/reset_encoder_cache", "/scale_elastic_ep", "/update_weights",
        "/init_weight_transfer_engine",
    ),
    "{path} is not served: the model is chosen at the start. POST /admin/model serves another one.": (
        "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete",
    ),
}  # fmt: skip
_REASON_OF = {path: reason for reason, paths in _REASONS.items() for path in paths}


def http_error_response(error: HTTPException, path: str) -> Response:
    """The whole answer to what the framework refuses of a request to this path."""
    messages = {404: absent_route_message(path), 405: _WRONG_METHOD}
    message = messages.get(error.status_code, error.detail)
    kind = "not_found_error" if error.status_code == 404 else RequestError.type
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return json_answer(error.status_code, body, dict(error.headers or {}))


def add_error_handlers(app: FastAPI) -> None:
    """Let every error that a route raises leave in this shape."""

    async def on_quire_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, QuireError)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        return http_error_response(error, path)

    async def on_wrong_query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        wrong = error.errors()[0]
        name = str(wrong["loc"][-1])[:64]
        what = wrong["msg"].removeprefix("Input should be ")
        return error_response(RequestError(f"{name} must be {what}.", param=name))

    app.add_exception_handler(QuireError, on_quire_error)
    app.add_exception_handler(RequestValidationError, on_wrong_query)
    app.add_exception_handler(HTTPException, on_http_error)


def absent_route_message(path: str) -> str:
    """Why there is no route of this path here."""
    return _REASON_OF.get(path, UNKNOWN).format(path=path)
