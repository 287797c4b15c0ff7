"""Ollama's API, which many desktop programs speak: /api/chat, /generate, /embed, /show, /tags, /ps and
/version."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.foundation.clock import SystemClock, WallClock
from quire.serving.api.auth import Caller
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_work import cancel_on_disconnect, convert
from quire.serving.api.routes.completions import prepare_completion
from quire.serving.api.schemas.completion import CompletionRequest
from quire.serving.api.schemas.known_fields import fields_named
from quire.serving.api.serving import Serving, json_response
from quire.serving.dialects.dialect import template_variables
from quire.serving.dialects.ollama.answers import OllamaAnswers, loaded, timestamp
from quire.serving.dialects.ollama.chat_request import NAMES, chat_request, completion_request, log_hints, model_name
from quire.serving.dialects.ollama.embeddings import add_ollama_embeddings, can_embed, can_generate
from quire.serving.dialects.ollama.schemas import (
    OLLAMA_FIELDS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from quire.text.tokenizer_files import read_json

Body = TypeVar("Body", OllamaChatRequest, OllamaGenerateRequest)
OLLAMA_VERSION = "0.32.7"
"""The version of the API that is spoken. Clients switch features on by it, and some refuse older ones: those before
0.13.4 have no /v1/responses, those before 0.14.0 no /v1/messages."""
NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""


def add_ollama(app: FastAPI, serving: Serving) -> None:
    add_models(app, serving)
    add_ollama_embeddings(app, serving)

    @app.post("/api/chat", openapi_extra=openapi_body(OllamaChatRequest), tags=["ollama"])
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await _respond(serving, request, OllamaChatRequest)

    @app.post("/api/generate", openapi_extra=openapi_body(OllamaGenerateRequest), tags=["ollama"])
    async def generate(request: Request) -> Response:
        """Answer a prompt, or go on with it."""
        return await _respond(serving, request, OllamaGenerateRequest)


async def _respond(serving: Serving, request: Request, schema: type[Body]) -> Response:
    body = await read_body(request, schema, OLLAMA_FIELDS, any_type=True)
    if not (body.messages if isinstance(body, OllamaChatRequest) else body.prompt or body.suffix):
        serving.model_name(model_name(body.model, serving.serves))
        return json_response(loaded(body.kind, body.model, WallClock(), unload=body.keep_alive in (0, "0")))
    serving.refuse_if_full(request)
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
    log_hints(body, serving.text.hints, variables)
    number = len(body.messages or ()) if isinstance(body, OllamaChatRequest) else 1
    chat = await convert(number, lambda: chat_request(body, model, variables, sees=serving.chat.sees))
    _, choices = await serving.chat.start(chat.sent_by(caller))
    return choices


async def _complete(serving: Serving, fields: CompletionRequest) -> RequestChoices:
    serving.session.check_room(1, 1)
    with fields_named(NAMES):
        prompts, params, options = await prepare_completion(serving, fields)
        if fields.max_tokens is None:
            params = msgspec.structs.replace(params, max_tokens=None)  # all that the context leaves
        collector = await serving.session.add_request(prompts, params, **options)
    return RequestChoices(serving.session, collector, serving.text.tokenizer, names=NAMES)


@dataclass(frozen=True)
class ModelFiles:
    """What the model's directory tells: the architecture, the bytes of all weights, a digest of names and sizes."""

    family: str
    dtype: str
    format: str
    size: int
    digest: str


def add_models(app: FastAPI, serving: Serving) -> None:
    files = _model_files(Path(serving.config.model.model))

    @app.get("/api/version", tags=["ollama"])
    async def version() -> Response:
        """The version of Ollama's API that is spoken."""
        return json_response({"version": OLLAMA_VERSION})

    @app.get("/api/tags", tags=["ollama"])
    async def tags() -> Response:
        """Every name of the model, then the adapters that are loaded."""
        cards = [_card(name, files, files.digest) for name in serving.names]
        adapters = serving.session.adapters.all
        cards += [_card(adapter.name, files, adapter.digest, serving.names[0]) for adapter in adapters]
        modified = {"modified_at": timestamp(serving.created)}
        return json_response({"models": [card | modified for card in cards]})

    @app.get("/api/ps", tags=["ollama"])
    async def ps() -> Response:
        """The model that is loaded: it stays."""
        ready = serving.session.ready
        if ready is None:
            return json_response({"models": []})
        more = {"expires_at": NEVER, "size_vram": files.size, "context_length": ready.max_model_len}
        return json_response({"models": [_card(serving.names[0], files, files.digest) | more]})

    @app.post("/api/show", openapi_extra=openapi_body(OllamaShowRequest), tags=["ollama"])
    async def show(request: Request) -> Response:
        """What the model is and can do."""
        fields = await read_body(request, OllamaShowRequest, OLLAMA_FIELDS, any_type=True)
        asked = fields.model or fields.name
        if not asked:
            raise RequestError("'model' is required.", param="model")
        name = serving.model_name(model_name(asked, serving.serves))
        return json_response(_described(serving, files, "" if name in serving.names else serving.names[0]))


def _model_files(directory: Path) -> ModelFiles:
    config = read_json(directory / "config.json")
    paths = [*directory.glob("*.safetensors")] or [*directory.glob("*.gguf")]
    weights = sorted((path.name, path.stat().st_size) for path in paths)
    return ModelFiles(
        family=str(config.get("model_type", "")),
        dtype=str(config.get("dtype", config.get("torch_dtype", ""))),
        format="gguf" if weights and weights[0][0].endswith(".gguf") else "safetensors",
        size=sum(size for _, size in weights),
        digest=hashlib.sha256(repr((config, weights)).encode()).hexdigest(),
    )


def _card(name: str, files: ModelFiles, digest: str, parent: str = "") -> dict[str, Any]:
    return {"name": name, "model": name, "size": files.size, "digest": digest, "details": _details(files, parent)}


def _details(files: ModelFiles, parent: str) -> dict[str, Any]:
    """The details of the model, or of an adapter, whose `parent` is the name of its base model."""
    return {
        "parent_model": parent,
        "format": files.format,
        "family": files.family,
        "families": [files.family],
        "parameter_size": "",
        "quantization_level": files.dtype,
    }


def _described(serving: Serving, files: ModelFiles, parent: str) -> dict[str, Any]:
    template, ready = serving.text.chat_template, serving.session.ready
    length = ready.max_model_len if ready else serving.config.model.max_model_len
    return {
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": template.source if template else "",
        "details": _details(files, parent),
        "model_info": {"general.architecture": files.family, f"{files.family}.context_length": length},
        "capabilities": _capabilities(serving),
        "modified_at": timestamp(serving.created),
    }


def _capabilities(serving: Serving) -> list[str]:
    parsers, tokenizer = serving.chat.parsers, serving.text.tokenizer
    generates = can_generate(serving)
    can = {
        "completion": generates,
        "vision": generates and serving.chat.sees,
        "embedding": can_embed(serving),
        "tools": generates and parsers.tool_parser is not None,
        "thinking": generates and parsers.reasoning_parser is not None,
        "insert": generates and tokenizer is not None and serving.renderer.fill_in_middle is not None,
    }
    return [name for name, has in can.items() if has]
