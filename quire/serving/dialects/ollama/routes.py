"""POST /api/chat and /api/generate: Ollama's API, which many desktop programs speak."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.foundation.clock import SystemClock, WallClock
from quire.serving.api.caller import Caller
from quire.serving.api.disconnect import cancel_on_disconnect
from quire.serving.api.request_body import check_object, openapi_body, read_object
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.routes.completions import prepare_completion
from quire.serving.api.serving import Serving, json_response
from quire.serving.api.shared_turn import convert
from quire.serving.dialects.ollama.answers import Kind, OllamaAnswers, loaded
from quire.serving.dialects.ollama.chat_request import chat_request, completion_request, model_name, named_by_ollama
from quire.serving.dialects.ollama.schemas import OLLAMA_FIELDS, OllamaChatRequest, OllamaGenerateRequest
from quire.text.hints import NOT_READ, THINKING_SWITCHES


def add_ollama(app: FastAPI, serving: Serving) -> None:
    """Add the routes to the application."""

    @app.post("/api/chat", openapi_extra=openapi_body(OllamaChatRequest), tags=["ollama"])
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_object(request, any_type=True)
        fields = await check_object(request, body, OllamaChatRequest, OLLAMA_FIELDS)
        if not fields.messages:
            return _loaded(serving, "chat", fields.model, unload=body.get("keep_alive") in (0, "0"))
        serving.refuse_if_full()
        return await cancel_on_disconnect(request, _answer(serving, request, fields))

    @app.post("/api/generate", openapi_extra=openapi_body(OllamaGenerateRequest), tags=["ollama"])
    async def generate(request: Request) -> Response:
        """Answer a prompt, or go on with it."""
        body = await read_object(request, any_type=True)
        fields = await check_object(request, body, OllamaGenerateRequest, OLLAMA_FIELDS)
        if not fields.prompt and not fields.suffix:
            return _loaded(serving, "generate", fields.model, unload=body.get("keep_alive") in (0, "0"))
        serving.refuse_if_full()
        return await cancel_on_disconnect(request, _answer(serving, request, fields))


def _loaded(serving: Serving, kind: Kind, asked: str, *, unload: bool) -> Response:
    serving.model_name(model_name(asked, serving.serves))
    return json_response(loaded(kind, asked, WallClock(), unload=unload))


async def _answer(serving: Serving, request: Request, body: OllamaChatRequest | OllamaGenerateRequest) -> Response:
    clock = SystemClock()
    began = clock.now()
    name = serving.model_name(model_name(body.model, serving.serves))
    kind: Kind = "generate" if isinstance(body, OllamaGenerateRequest) else "chat"
    with named_by_ollama():
        choices = await _start(serving, body, name, request.state.caller)
    shows = body.think is not False
    answers = OllamaAnswers(kind, body.model, choices, clock, WallClock(), began, show_thinking=shows)
    request_id, stream = request.state.request_id, body.stream is not False
    serving.log_request(request_id, request.scope["path"], choices.adds, stream=stream)
    if stream:
        return serving.stream(answers, choices, request_id)
    try:
        with named_by_ollama():
            (whole,) = await choices.collect()
    finally:
        choices.close()
    return json_response(answers.body(whole))


async def _start(
    serving: Serving, body: OllamaChatRequest | OllamaGenerateRequest, name: str, caller: Caller
) -> RequestChoices:
    if isinstance(body, OllamaGenerateRequest) and (body.raw or body.suffix):
        fields = completion_request(body).sent_by(caller)
        fields.model = name
        serving.session.check_room(1, 1)
        prompts, params, options = await prepare_completion(serving, fields)
        if fields.max_tokens is None:
            params = msgspec.structs.replace(params, max_tokens=None)  # all that the context leaves
        collector = await serving.session.add_request(prompts, params, **options)
        return RequestChoices(serving.session, collector, serving.text.tokenizer)
    template = serving.text.chat_template
    variables = template.variables if template else frozenset[str]()
    if isinstance(body.think, bool) and not variables.intersection(THINKING_SWITCHES):
        serving.chat.hints.drop("think", NOT_READ)
    number = len(body.messages or ()) if isinstance(body, OllamaChatRequest) else 1
    chat = await convert(number, lambda: chat_request(body, variables))
    chat.model = name
    return await serving.chat.start(chat.sent_by(caller))
