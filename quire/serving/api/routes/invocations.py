"""POST /invocations, SageMaker's only route for work: the body says which endpoint is meant."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.serving.api.disconnect import cancel_on_disconnect
from quire.serving.api.request_body import check_object, openapi_body, read_object
from quire.serving.api.routes.chat import answer_chat
from quire.serving.api.routes.completions import answer_completion
from quire.serving.api.routes.generate import answer_generate
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.completion import CompletionRequest
from quire.serving.api.schemas.generate import GenerateRequest
from quire.serving.api.serving import Serving

_BODIES: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, GenerateRequest)


def add_invocations(app: FastAPI, serving: Serving) -> None:
    """Add the route to the application."""

    @app.post("/invocations", openapi_extra=openapi_body(*_BODIES), tags=["generate"])
    async def invoke(request: Request) -> Response:
        """A conversation, a completion or token ids: as /v1/chat/completions, /v1/completions or
        /inference/v1/generate."""
        serving.refuse_if_full()
        body = await read_object(request)
        return await cancel_on_disconnect(request, _answer(serving, request, body))


async def _answer(serving: Serving, request: Request, body: dict[str, Any]) -> Response:
    if "messages" in body:
        return await answer_chat(serving, request, await check_object(request, body, ChatRequest))
    if "prompt" in body:
        return await answer_completion(serving, request, await check_object(request, body, CompletionRequest))
    if "token_ids" in body:
        return await answer_generate(serving, request, await check_object(request, body, GenerateRequest))
    raise RequestError("Send messages, prompt or token_ids: they say which endpoint is meant.", param="messages")
