"""POST /score and /rerank: how well documents answer a query.

A cross-encoder reads both in one text. A model that embeds gets the cosine of both embeddings, or what its files name
instead; one with a vector for each token (ColBERT), for each of the query's tokens the largest product with one of the
document's, added up (MaxSim, Khattab & Zaharia 2020).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.pooling_params import PoolingTask
from quire.serving.api.pooling.inputs import Cut, PooledText, encoded
from quire.serving.api.pooling.pairs import encoded_pairs
from quire.serving.api.pooling.routes import response_head
from quire.serving.api.pooling.scoring_schemas import (
    SCORING_FIELDS,
    RerankRequest,
    ScoreRequest,
    ScoringFields,
    texts_of,
)
from quire.serving.api.pooling.service import PooledRequest, usage
from quire.serving.api.pooling.vectors import Pooled
from quire.serving.api.request_body import openapi_body
from quire.serving.api.request_work import TimeSlice
from quire.serving.api.schemas.known_fields import AS_THEY_ARE
from quire.serving.api.serving import Serving, json_response
from quire.text.similarities import SIMILARITIES, max_sim

TASKS: tuple[PoolingTask, ...] = ("score", "embed", "token_embed")
"""Tasks that make scores, the best first."""


def add_scoring(app: FastAPI, serving: Serving) -> None:
    score_body, rerank_body = openapi_body(ScoreRequest), openapi_body(RerankRequest)

    @app.post("/score", openapi_extra=score_body, tags=["pooling"])
    @app.post("/v1/score", name="score", openapi_extra=score_body, tags=["pooling"])
    async def score(request: Request) -> Response:
        """A score for each pair of texts."""
        return await serving.read_and_answer(request, ScoreRequest, answer_score, SCORING_FIELDS)

    @app.post("/rerank", openapi_extra=rerank_body, tags=["pooling"])
    @app.post("/v1/rerank", name="rerank", openapi_extra=rerank_body, tags=["pooling"])
    @app.post("/v2/rerank", name="rerank", openapi_extra=rerank_body, tags=["pooling"])
    async def rerank(request: Request) -> Response:
        """Documents, ordered by how well they answer a query, with their scores: Jina's and Cohere's API."""
        return await serving.read_and_answer(request, RerankRequest, answer_rerank, SCORING_FIELDS)


async def answer_score(serving: Serving, request: Request, fields: ScoreRequest) -> Response:
    asked = PooledRequest.accept(serving, request, fields)
    names = fields.sides()
    queries, documents = (texts_of(name, getattr(fields, name)) for name in names)
    if len(queries) not in (1, len(documents)):
        raise RequestError(
            f"{names[0]} has {len(queries)} texts and {names[1]} {len(documents)}: send one text, or as many.",
            param=names[0],
        )
    scores, results = await _scores(asked, fields, queries, documents, names)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return json_response({**response_head(asked, "score"), "data": data, "usage": usage(results)})


async def answer_rerank(serving: Serving, request: Request, fields: RerankRequest) -> Response:
    asked = PooledRequest.accept(serving, request, fields)
    if fields.top_n is not None and fields.top_n < 0:
        raise RequestError(f"top_n must be at least 0, got {fields.top_n}.", param="top_n")
    (query,), documents = texts_of("query", fields.query), texts_of("documents", fields.documents)
    scores, results = await _scores(asked, fields, [query], documents, ("query", "documents"))
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[: fields.top_n or None]
    shown = fields.return_documents is not False
    found = [
        {"index": place}
        | ({"document": {"text": documents[place]}} if shown else {})
        | {"relevance_score": scores[place]}
        for place in order
    ]
    head = response_head(asked, "rerank")
    return json_response({"id": head["id"], "model": head["model"], "usage": usage(results), "results": found})


async def _scores(
    asked: PooledRequest,
    fields: ScoringFields,
    queries: Sequence[str],
    documents: Sequence[str],
    names: tuple[str, str],
) -> tuple[list[float], list[Pooled]]:
    """The score of each document with its query, or with the only one, and all that was computed for that."""
    task = asked.first_task(*TASKS, what="score pairs of texts")
    cut = Cut.of(asked.serving, fields)
    limits = fields.limits(cut.longest)
    if task != "score":
        return await _embedded_scores(asked, fields, task, (queries, documents), names, cut, limits)
    pairs = [(queries[place if len(queries) > 1 else 0], text) for place, text in enumerate(documents)]
    listed = isinstance(getattr(fields, names[1]), list)
    places = [f"{names[1]}[{place}]" if listed else names[1] for place in range(len(documents))]
    texts = await encoded_pairs(asked.serving, pairs, cut, limits, asked.info, fields.template_variables, places)
    results = await asked.run(texts, fields.params(task), AS_THEY_ARE)
    return [float(result.array.reshape(-1)[0]) for result in results], results


async def _embedded_scores(
    asked: PooledRequest,
    fields: ScoringFields,
    task: PoolingTask,
    sides: tuple[Sequence[str], Sequence[str]],
    names: tuple[str, str],
    cut: Cut,
    limits: tuple[int | None, int | None],
) -> tuple[list[float], list[Pooled]]:
    """Scores of embeddings; each text is computed once."""
    texts = list[PooledText]()
    for side, name, limit in zip(sides, names, limits, strict=True):
        kept = cut if limit is None else Cut(cut.longest, (min(limit, (cut.kept or (limit,))[0]), "right"))
        listed = isinstance(getattr(fields, name), list)
        texts += await encoded(asked.serving, side, kept, asked.info, is_list=listed, param=name)
    results = await asked.run(texts, fields.params(task), AS_THEY_ARE)
    number = len(sides[0])
    first, second = results[:number], results[number:]
    compare = SIMILARITIES[asked.info.similarity]
    time_slice, scores = TimeSlice(), list[float]()
    for place, result in enumerate(second):
        query = first[place if number > 1 else 0]
        left, right = query.array.astype("f8"), result.array.astype("f8")
        if task == "token_embed":
            scores.append(await asyncio.to_thread(max_sim, left, right))
        else:
            scores.append(compare(left, right))
        await time_slice.offer()
    return scores, results
