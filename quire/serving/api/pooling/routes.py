"""POST /v1/embeddings, /pooling and /classify."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.pooling_params import PoolingTask
from quire.serving.api.json_pieces import JsonPieces, PiecesResponse
from quire.serving.api.pooling.inputs import pooled_texts
from quire.serving.api.pooling.schemas import (
    POOLING_FIELDS,
    ClassifyRequest,
    EmbeddingRequest,
    EncodingFields,
    PoolingRequest,
)
from quire.serving.api.pooling.service import PooledRequest, usage
from quire.serving.api.pooling.vectors import Pooled, as_bytes, base64_text, json_numbers, written
from quire.serving.api.request_body import openapi_body
from quire.serving.api.request_work import TimeSlice
from quire.serving.api.schemas.known_fields import FieldNames
from quire.serving.api.serving import Serving, json_response

NAMES = FieldNames({"prompt": "input"})
MAX_METADATA = 2**15
"""Maximum number of bytes of the header metadata: clients read no longer ones."""
_encode = msgspec.json.Encoder().encode


def add_pooling(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/embeddings", openapi_extra=openapi_body(EmbeddingRequest), tags=["pooling"])
    async def embed(request: Request) -> Response:
        """A vector for each text."""
        return await serving.read_and_answer(request, EmbeddingRequest, answer_embeddings, POOLING_FIELDS)

    @app.post("/pooling", openapi_extra=openapi_body(PoolingRequest), tags=["pooling"])
    async def pool(request: Request) -> Response:
        """What the model makes of each text, or of each of its tokens: vectors, or values of labels."""
        return await serving.read_and_answer(request, PoolingRequest, answer_pooling, POOLING_FIELDS)

    @app.post("/classify", openapi_extra=openapi_body(ClassifyRequest), tags=["pooling"])
    async def classify(request: Request) -> Response:
        """The likeliest label of each text, and the probabilities of all."""
        return await serving.read_and_answer(request, ClassifyRequest, answer_classify, POOLING_FIELDS)


async def answer_embeddings(serving: Serving, request: Request, fields: EmbeddingRequest) -> Response:
    asked = PooledRequest.accept(serving, request, fields)
    task = asked.first_task("embed", what="embed texts")
    return await _vectors(asked, fields, task, "embd", "embedding", "embedding")


async def answer_pooling(serving: Serving, request: Request, fields: PoolingRequest) -> Response:
    asked = PooledRequest.accept(serving, request, fields)
    return await _vectors(asked, fields, fields.task or asked.info.tasks[0], "pool", "pooling", "data")


async def _vectors(
    asked: PooledRequest, fields: EncodingFields, task: PoolingTask, prefix: str, kind: str, value: str
) -> Response:
    """The response with vectors, as the field `value` of items of this kind."""
    params, write = fields.params(task, fields.dimensions), _writer(fields)
    results = await asked.run(await pooled_texts(asked.serving, fields, asked.info), params, NAMES)
    head = response_head(asked, prefix)
    if fields.encoding_format in ("bytes", "bytes_only"):
        return await _bytes_response(fields, results, head)
    data = await items(results, lambda index, result: _item(index, kind, value, write(result)))
    return json_response({**head, "data": data, "usage": usage(results)})


def _item(index: int, kind: str, name: str, value: bytes) -> bytes:
    return b'{"index":%d,"object":"%s","%s":%s}' % (index, kind.encode(), name.encode(), value)


def _writer(fields: EncodingFields) -> Callable[[Pooled], bytes]:
    if fields.encoding_format not in (None, "float"):
        return lambda result: base64_text(_bytes(fields, result))
    for name in ("embed_dtype", "endianness"):
        if getattr(fields, name) is not None:
            raise RequestError(f"{name} needs encoding_format base64, bytes or bytes_only.", param=name)
    return lambda result: json_numbers(result.array)


def _bytes(fields: EncodingFields, result: Pooled) -> bytes:
    return as_bytes(result.array, fields.embed_dtype or "float32", fields.endianness or "native")


async def items(results: Sequence[Pooled], write: Callable[[int, Pooled], bytes]) -> JsonPieces:
    """A JSON list with an item for each result. Other requests go on in between."""
    time_slice, pieces = TimeSlice(), [b"["]
    for index, result in enumerate(results):
        pieces.append((b"," if index else b"") + await written(index, result, write))
        await time_slice.offer()
    return JsonPieces([*pieces, b"]"])


def response_head(asked: PooledRequest, prefix: str) -> dict[str, Any]:
    """The fields that begin a response, with an id of this prefix."""
    return {
        "id": f"{prefix}-{asked.request.state.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": asked.serving.model_name(asked.fields.model),
    }


async def _bytes_response(fields: EncodingFields, results: Sequence[Pooled], head: dict[str, Any]) -> Response:
    """The response whose body is the bytes of all vectors, one behind the other."""
    time_slice, pieces = TimeSlice(), list[bytes]()
    for index, result in enumerate(results):
        pieces.append(await written(index, result, lambda _, each: _bytes(fields, each)))
        await time_slice.offer()
    headers, media_type = {}, "application/octet-stream"
    if fields.encoding_format == "bytes":
        data, start = list[dict[str, Any]](), 0
        about = {"embed_dtype": fields.embed_dtype or "float32", "endianness": fields.endianness or "native"}
        for index, (result, piece) in enumerate(zip(results, pieces, strict=True)):
            data.append({"index": index, **about, "start": start, "end": start + len(piece), "shape": result.shape})
            start += len(piece)
        metadata = _encode({**head, "data": data, "usage": usage(results)})
        if len(metadata) > MAX_METADATA:
            raise RequestError(
                f"The header metadata would have {len(metadata)} bytes, more than clients read: send fewer texts, or "
                "encoding_format bytes_only.",
                param="encoding_format",
            )
        headers["metadata"] = metadata.decode()
    return PiecesResponse(pieces, headers=headers, media_type=media_type)


async def answer_classify(serving: Serving, request: Request, fields: ClassifyRequest) -> Response:
    asked = PooledRequest.accept(serving, request, fields)
    task = asked.first_task("classify", what="classify texts")
    results = await asked.run(await pooled_texts(serving, fields, asked.info), fields.params(task), NAMES)
    labels = asked.info.labels
    data = await items(results, lambda index, result: _label_item(index, result, labels))
    return json_response({**response_head(asked, "classify"), "data": data, "usage": usage(results)})


def _label_item(index: int, result: Pooled, labels: Sequence[str]) -> bytes:
    """Which label is likeliest, and the values of all; a single value has one label, whatever it is."""
    best = int(result.array.argmax())
    label = labels[best] if best < len(labels) else None
    return b'{"index":%d,"label":%s,"probs":%s,"num_classes":%d}' % (
        index, _encode(label), json_numbers(result.array), result.array.size,
    )  # fmt: skip
