"""POST /invocations, SageMaker's only route: the body says which endpoint is meant."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.foundation.messages.from_engine import NO_POOLING
from quire.serving.api.pooling.routes import answer_classify, answer_embeddings, answer_pooling
from quire.serving.api.pooling.schemas import POOLING_FIELDS, ClassifyRequest, EmbeddingRequest, PoolingRequest
from quire.serving.api.pooling.scoring import answer_rerank, answer_score
from quire.serving.api.pooling.scoring_schemas import SCORING_FIELDS, RerankRequest, ScoreRequest
from quire.serving.api.request_body import check_object, openapi_body, read_object
from quire.serving.api.request_work import cancel_on_disconnect
from quire.serving.api.routes.chat import answer_chat
from quire.serving.api.routes.completions import answer_completion, answer_generate
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.completion import CompletionRequest, GenerateRequest
from quire.serving.api.schemas.known_fields import OPENAI_FIELDS, FieldLists
from quire.serving.api.serving import Answer, Serving

_Endpoint = tuple[type[Any], Answer[Any], FieldLists]
_GENERATING: dict[str, _Endpoint] = {
    "messages": (ChatRequest, answer_chat, OPENAI_FIELDS),
    "prompt": (CompletionRequest, answer_completion, OPENAI_FIELDS),
    "token_ids": (GenerateRequest, answer_generate, OPENAI_FIELDS),
}
"""Endpoints of models that generate, by the field that says so."""
_SCORING: dict[str, _Endpoint] = {
    "query": (RerankRequest, answer_rerank, SCORING_FIELDS),
    **dict.fromkeys(("text_1", "queries", "data_1"), (ScoreRequest, answer_score, SCORING_FIELDS)),
}
"""Endpoints for pairs of texts."""
_POOLING: dict[str, _Endpoint] = {
    "embed": (EmbeddingRequest, answer_embeddings, POOLING_FIELDS),
    "classify": (ClassifyRequest, answer_classify, POOLING_FIELDS),
}
"""Endpoints for texts, by the model's task; all others are served by /pooling."""
_BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest, CompletionRequest, GenerateRequest, EmbeddingRequest, ClassifyRequest, PoolingRequest, ScoreRequest,
    RerankRequest,
)  # fmt: skip


def add_invocations(app: FastAPI, serving: Serving) -> None:
    @app.post("/invocations", openapi_extra=openapi_body(*_BODIES), tags=["generate"])
    async def invoke(request: Request) -> Response:
        """What the body asks for: a conversation, a completion, token ids, a vector or label for each text, scores."""
        serving.refuse_if_full(request)
        body = await read_object(request)
        return await cancel_on_disconnect(request, _invoke(serving, request, body))


async def _invoke(serving: Serving, request: Request, body: dict[str, Any]) -> Response:
    schema, answer, lists = _endpoint(serving, body)
    return await answer(serving, request, await check_object(request, body, schema, lists))


def _endpoint(serving: Serving, body: dict[str, Any]) -> _Endpoint:
    """The endpoint that a body is for. Conversations are for chat, where the model generates."""
    ready = serving.session.ready
    info = NO_POOLING if ready is None else ready.pooling
    for name, endpoint in _GENERATING.items():
        if name in body and (info.generates or name != "messages"):
            return endpoint
    for name, endpoint in _SCORING.items():
        if name in body:
            return endpoint
    if "input" in body or "messages" in body:
        pooling: _Endpoint = (PoolingRequest, answer_pooling, POOLING_FIELDS)
        return pooling if "task" in body else next((_POOLING[t] for t in info.tasks if t in _POOLING), pooling)
    raise RequestError(
        "Send messages, prompt, token_ids, input, query or text_1: they say which endpoint is meant.", param="messages"
    )
