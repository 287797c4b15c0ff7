"""Ollama's POST /api/embed, and /api/embeddings, which is older and takes one text."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.foundation.clock import SystemClock
from quire.pooling_params import PoolingParams
from quire.serving.api.json_pieces import JsonPieces
from quire.serving.api.pooling.inputs import Cut, check_texts, encoded
from quire.serving.api.pooling.routes import items
from quire.serving.api.pooling.service import PooledRequest
from quire.serving.api.pooling.vectors import Pooled, json_numbers
from quire.serving.api.request_body import check_fields, openapi_body, read_body
from quire.serving.api.request_work import cancel_on_disconnect
from quire.serving.api.schemas.known_fields import FieldNames
from quire.serving.api.schemas.queue_fields import QueueFields
from quire.serving.api.serving import Serving, json_response
from quire.serving.dialects.ollama.chat_request import model_name
from quire.serving.dialects.ollama.schemas import (
    OLLAMA_FIELDS,
    OPTION_FIELDS,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    Options,
)
from quire.text.pooled_texts import named_prompt


def add_ollama_embeddings(app: FastAPI, serving: Serving) -> None:
    @app.post("/api/embed", openapi_extra=openapi_body(OllamaEmbedRequest), tags=["ollama"])
    async def embed_texts(request: Request) -> Response:
        """Embed one or several texts."""
        body = await read_body(request, OllamaEmbedRequest, OLLAMA_FIELDS, any_type=True)
        serving.refuse_if_full(request)
        return await cancel_on_disconnect(request, _embed(serving, request, body))

    @app.post("/api/embeddings", openapi_extra=openapi_body(OllamaEmbeddingsRequest), tags=["ollama"])
    async def embed_text(request: Request) -> Response:
        """Embed one text; older than /api/embed."""
        body = await read_body(request, OllamaEmbeddingsRequest, OLLAMA_FIELDS, any_type=True)
        serving.refuse_if_full(request)
        return await cancel_on_disconnect(request, _embed_one(serving, request, body))


async def _embed(serving: Serving, request: Request, body: OllamaEmbedRequest) -> Response:
    clock = SystemClock()
    began = clock.now()
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    if body.input == "":
        texts = []  # by which clients load a model
    params = PoolingParams(task="embed", dimensions=body.dimensions, use_activation=True)
    results = await _run(serving, request, body, texts, params, "input", cuts=body.truncate is not False)
    vectors = await items(results, lambda _, result: json_numbers(result.array))
    return json_response({
        "model": body.model,
        "embeddings": vectors,
        "total_duration": round((clock.now() - began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": sum(result.tokens for result in results),
    })  # fmt: skip


async def _embed_one(serving: Serving, request: Request, body: OllamaEmbeddingsRequest) -> Response:
    texts = [body.prompt] if body.prompt else []
    results = await _run(serving, request, body, texts, PoolingParams(task="embed"), "prompt", cuts=True)
    vector = json_numbers(results[0].array) if results else b"[]"
    return json_response({"embedding": JsonPieces([vector])})


async def _run(
    serving: Serving,
    request: Request,
    body: OllamaEmbedRequest | OllamaEmbeddingsRequest,
    texts: Sequence[str],
    params: PoolingParams,
    name: str,
    *,
    cuts: bool,
) -> list[Pooled]:
    """What the model makes of texts from the field `name`; long ones are cut, or refused."""
    check_fields(body.options or {}, Options, OPTION_FIELDS)
    fields = QueueFields(model=serving.model_name(model_name(body.model, serving.serves)))
    asked = PooledRequest.accept(serving, request, fields)
    asked.first_task("embed", what="embed texts")
    check_texts(name, texts)
    if not texts:
        return []
    longest = serving.session.input_processor.longest_text
    cut = Cut(longest, (longest, "right") if cuts else None)
    is_list = isinstance(getattr(body, name), list)
    prompt = named_prompt(asked.info, None)
    inputs = await encoded(serving, texts, cut, asked.info, prompt=prompt, is_list=is_list, param=name)
    return await asked.run(inputs, params, FieldNames({"prompt": name}))


def can_embed(serving: Serving) -> bool:
    """Whether the model makes embeddings."""
    ready = serving.session.ready
    return ready is not None and "embed" in ready.pooling.tasks


def can_generate(serving: Serving) -> bool:
    """Whether the model generates text."""
    ready = serving.session.ready
    return ready is None or ready.pooling.generates
