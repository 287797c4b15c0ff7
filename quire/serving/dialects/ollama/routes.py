"""POST /api/chat and /api/generate: Ollama's API, which many desktop programs speak."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.foundation.clock import SystemClock, WallClock
from quire.serving.api.disconnect import cancel_on_disconnect
from quire.serving.api.request_body import check_object, openapi_body, read_object
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_head import Caller
from quire.serving.api.routes.completions import prepare_completion
from quire.serving.api.schemas.completion import CompletionRequest
from quire.serving.api.schemas.known_fields import fields_named
from quire.serving.api.serving import Serving, json_response
from quire.serving.api.time_slice import convert
from quire.serving.dialects.dialect import template_variables
from quire.serving.dialects.ollama.answers import OllamaAnswers, loaded
from quire.serving.dialects.ollama.chat_request import NAMES, chat_request, completion_request, log_hints, model_name
from quire.serving.dialects.ollama.model_routes import add_models
from quire.serving.dialects.ollama.schemas import OLLAMA_FIELDS, OllamaChatRequest, OllamaGenerateRequest

Body = TypeVar("Body", OllamaChatRequest, OllamaGenerateRequest)


def add_ollama(app: FastAPI, serving: Serving) -> None:
    """Add the routes to the application."""
    add_models(app, serving)

    @app.post("/api/chat", openapi_extra=openapi_body(OllamaChatRequest), tags=["ollama"])
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await _respond(serving, request, OllamaChatRequest)

    @app.post("/api/generate", openapi_extra=openapi_body(OllamaGenerateRequest), tags=["ollama"])
    async def generate(request: Request) -> Response:
        """Answer a prompt, or go on with it."""
        return await _respond(serving, request, OllamaGenerateRequest)


async def _respond(serving: Serving, request: Request, schema: type[Body]) -> Response:
    sent = await read_object(request, any_type=True)
    body = await check_object(request, sent, schema, OLLAMA_FIELDS)
    if not (body.messages if isinstance(body, OllamaChatRequest) else body.prompt or body.suffix):
        serving.model_name(model_name(body.model, serving.serves))
        unload = sent.get("keep_alive") in (0, "0")
        return json_response(loaded(body.kind, body.model, WallClock(), unload=unload))
    serving.refuse_if_full()
    return await cancel_on_disconnect(request, _answer(serving, request, body))


async def _answer(serving: Serving, request: Request, body: OllamaChatRequest | OllamaGenerateRequest) -> Response:
    clock = SystemClock()
    began = clock.now()
    choices = await _start(serving, body, request.state.caller)
    shows = body.think is not False
    answers = OllamaAnswers(body.kind, body.model, choices, clock, WallClock(), began, show_thinking=shows)
    return await serving.answer(request, answers, choices, body.stream is not False)


async def _start(serving: Serving, body: OllamaChatRequest | OllamaGenerateRequest, caller: Caller) -> RequestChoices:
    model = serving.model_name(model_name(body.model, serving.serves))
    if isinstance(body, OllamaGenerateRequest) and (body.raw or body.suffix):
        return await _complete(serving, completion_request(body, model).sent_by(caller))
    variables = template_variables(serving)
    log_hints(body, serving.chat.hints, variables)
    number = len(body.messages or ()) if isinstance(body, OllamaChatRequest) else 1
    chat = await convert(number, lambda: chat_request(body, model, variables))
    return await serving.chat.start(chat.sent_by(caller))


async def _complete(serving: Serving, fields: CompletionRequest) -> RequestChoices:
    serving.session.check_room(1, 1)
    with fields_named(NAMES):
        prompts, params, options = await prepare_completion(serving, fields)
        if fields.max_tokens is None:
            params = msgspec.structs.replace(params, max_tokens=None)  # all that the context leaves
        collector = await serving.session.add_request(prompts, params, **options)
    return RequestChoices(serving.session, collector, serving.text.tokenizer, names=NAMES)
