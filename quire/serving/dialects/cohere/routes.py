"""Cohere's POST /v2/embed: vectors in several forms at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.foundation.messages.from_engine import PoolingInfo
from quire.pooling_params import PoolingParams
from quire.serving.api.large_requests.readers import TruncationSide
from quire.serving.api.pooling.inputs import Cut, check_texts, encoded
from quire.serving.api.pooling.routes import items
from quire.serving.api.pooling.service import PooledRequest
from quire.serving.api.pooling.vectors import Pooled, as_bytes, base64_text, int8_numbers, json_numbers, packed_bits
from quire.serving.api.request_body import openapi_body
from quire.serving.api.schemas.known_fields import FieldNames
from quire.serving.api.serving import Serving, json_response
from quire.serving.dialects.cohere.schemas import COHERE_FIELDS, CohereEmbedRequest, EmbeddingType
from quire.text.pooled_texts import named_prompt

NAMES = FieldNames({"prompt": "texts", "dimensions": "output_dimension"})
_PROMPTS: Mapping[str, Sequence[str]] = {
    "search_query": ("query", "web_search_query", "retrieval.query", "Retrieval-query"),
    "search_document": ("document", "passage", "retrieval.passage", "Retrieval-document"),
    "classification": ("Classification",),
    "clustering": ("separation", "Clustering"),
    "image": (),
}
"""Cohere's input types, and what models call such a prompt beside that."""


def add_cohere(app: FastAPI, serving: Serving) -> None:
    @app.post("/v2/embed", openapi_extra=openapi_body(CohereEmbedRequest), tags=["pooling"])
    async def embed_in_forms(request: Request) -> Response:
        """Cohere's: vectors for texts, as floats, 8-bit integers, bits or base64."""
        return await serving.read_and_answer(request, CohereEmbedRequest, _embed, COHERE_FIELDS)


async def _embed(serving: Serving, request: Request, fields: CohereEmbedRequest) -> Response:
    asked = PooledRequest.accept(serving, request, fields)
    task = asked.first_task("embed", what="embed texts")
    types: list[EmbeddingType] = list(dict.fromkeys(fields.embedding_types or ["float"]))
    _check_dimension(types, fields.output_dimension or asked.info.dim)
    name, texts = fields.whole_texts()
    check_texts(name, texts)
    prompt = _prompt(serving, asked.info, fields.input_type)
    inputs = await encoded(serving, texts, _cut(serving, fields), asked.info, prompt=prompt, param=name)
    results = await asked.run(inputs, PoolingParams(task=task, dimensions=fields.output_dimension), NAMES)
    embeddings: dict[str, Any] = {}
    for each in types:
        embeddings[each] = await items(results, lambda _, result, write=_WRITERS[each]: write(result))  # type: ignore[misc]
    tokens = sum(result.tokens for result in results)
    return json_response({
        "id": f"embd-{request.state.request_id}",
        "embeddings": embeddings,
        "texts": texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}},
        "response_type": "embeddings_by_type",
    })  # fmt: skip


def _check_dimension(types: Sequence[EmbeddingType], dimension: int) -> None:
    if dimension % 8 and (bits := [each for each in types if each in ("binary", "ubinary")]):
        raise RequestError(
            f"embedding_types: {bits[0]} packs eight numbers into a byte, and vectors have {dimension}.",
            param="embedding_types",
        )


def _prompt(serving: Serving, info: PoolingInfo, input_type: str | None) -> str:
    """The prompt for texts of this type; empty if it is one of Cohere's types and the model has no such prompt."""
    if input_type is None or input_type in info.prompts or input_type not in _PROMPTS:
        return named_prompt(info, input_type, "input_type")
    if (found := next((name for name in _PROMPTS[input_type] if name in info.prompts), None)) is not None:
        return info.prompts[found]
    serving.text.hints.drop(f"input_type {input_type}", "the model has no prompt for it")
    return ""


def _cut(serving: Serving, fields: CohereEmbedRequest) -> Cut:
    longest, most = serving.session.input_processor.longest_text, fields.max_tokens
    if most is not None and most < 1:
        raise RequestError(f"max_tokens must be at least 1, got {most}.", param="max_tokens")
    kept = longest if most is None else min(longest, most)
    if fields.truncate == "NONE":
        return Cut(kept)
    side: TruncationSide = "left" if fields.truncate == "START" else "right"
    return Cut(longest, (kept, side))


_WRITERS: dict[EmbeddingType, Callable[[Pooled], bytes]] = {
    "float": lambda result: json_numbers(result.array),
    "int8": lambda result: json_numbers(int8_numbers(result.array)),
    "uint8": lambda result: json_numbers(int8_numbers(result.array) + 128),
    "binary": lambda result: json_numbers(packed_bits(result.array).astype("i2") - 128),
    "ubinary": lambda result: json_numbers(packed_bits(result.array)),
    "base64": lambda result: base64_text(as_bytes(result.array, "float32", "little")),
}
