"""What a route raises, as the server's answer. Owns the application's handlers; the answers are `error_responses`."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import QuireError, RequestError
from quire.serving.api.absent_routes import absent_route_message
from quire.serving.api.error_responses import error_response, json_answer

_WRONG_METHOD = "This route does not take this method. GET /docs lists all routes."


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
