"""/v1/responses: answering, and what may be asked about an answer later."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.errors import RequestError
from quire.serving.api.auth import use_request_id
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.serving import Serving, json_response
from quire.serving.api.stream_response import EVENT_STREAM
from quire.serving.dialects.batches.routes import page_body
from quire.serving.dialects.dialect import name_dropped
from quire.serving.dialects.responses.answers import ABANDONED, failed
from quire.serving.dialects.responses.schemas import ResponsesRequest
from quire.serving.dialects.responses.service import ResponsesService, RunningResponse
from quire.serving.dialects.responses.tasks import ResponseTasks, follow
from quire.serving.store.limits import UnknownIdError
from quire.serving.store.responses import StoredResponse
from quire.serving.store.store import Store

MAX_PAGE = 100
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def add_responses(app: FastAPI, serving: Serving) -> None:
    app.state.responses = tasks = ResponseTasks(serving.store)
    service = ResponsesService(serving)

    @app.post("/v1/responses", openapi_extra=openapi_body(ResponsesRequest), tags=["responses"])
    async def create(request: Request) -> Response:
        """Answer something."""
        return await serving.read_and_answer(request, ResponsesRequest, partial(_answer, service, tasks))

    @app.post("/v1/responses/input_tokens", openapi_extra=openapi_body(ResponsesRequest), tags=["responses"])
    async def count(request: Request) -> Response:
        """How many tokens the prompt has."""
        fields = await read_body(request, ResponsesRequest)
        fields.check()
        tokens, dropped = await service.count_input_tokens(fields)
        answer = json_response({"object": "response.input_tokens", "input_tokens": tokens})
        return name_dropped(answer, dropped, serving.text.hints)

    @app.get("/v1/responses/{response_id}", tags=["responses"])
    async def retrieve(response_id: str, stream: bool = False, starting_after: int = -1) -> Response:
        """A response that was kept; of one in the background also its events behind a number."""
        store = serving.stored
        body = _current(await store.responses.get(response_id))
        if not stream:
            return json_response(body)
        if not body["background"]:
            raise RequestError("Only responses that were made with background=true have kept events.", param="stream")
        return _stream(store, response_id, starting_after)

    @app.delete("/v1/responses/{response_id}", tags=["responses"])
    async def delete(response_id: str) -> Response:
        """Forget a response; if it still runs, it ends."""
        await serving.stored.responses.delete(response_id)
        tasks.stop(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{response_id}/cancel", tags=["responses"])
    async def cancel(response_id: str) -> Response:
        """End a response in the background."""
        responses = serving.stored.responses
        body = _current(await responses.get(response_id))
        if not body["background"]:
            raise RequestError(
                "Only responses that were made with background=true can be cancelled; close the connection of others.",
                param="response_id",
            )
        cancelled = {**body, "status": "cancelled"}
        if await responses.end(response_id, "cancelled", msgspec.json.encode(cancelled)):
            tasks.stop(response_id)
        return json_response(_current(await responses.get(response_id)))

    @app.get("/v1/responses/{response_id}/input_items", tags=["responses"])
    async def input_items(
        response_id: str,
        after: str | None = None,
        limit: int = Query(20, ge=1, le=MAX_PAGE),
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """What a response was made from, the items of the responses before it included."""
        items = await _all_items(serving.stored, response_id)
        if order == "desc":
            items = items[::-1]
        begin = 0
        if after is not None:
            begin = next((at for at, item in enumerate(items, 1) if item["id"] == after), 0)
            if not begin:
                raise UnknownIdError.of("item", after, "after")
        return json_response(page_body(items[begin : begin + limit], begin + limit < len(items)))


async def _answer(
    service: ResponsesService, tasks: ResponseTasks, serving: Serving, request: Request, fields: ResponsesRequest
) -> Response:
    use_request_id(request, fields.request_id)
    fields.check()
    store = serving.stored if fields.background else None
    kept, stream = fields.store is not False, bool(fields.stream)
    running = await service.start(fields, request.state.caller, tasks.keep if kept else lambda _: None)
    choices, events = running.choices, running.events
    if store is not None:
        serving.log_request(request, choices.adds, stream=stream)
        answer = await _in_background(store, tasks, running, stream=stream)
    else:
        if stream:
            events.begin()
        answer = await serving.answer(request, events, choices, stream, events.take())
        if kept and not stream:
            await tasks.put(running)
    return name_dropped(answer, running.dropped, serving.text.hints)


async def _in_background(store: Store, tasks: ResponseTasks, running: RunningResponse, *, stream: bool) -> Response:
    try:
        await store.responses.put(running.stored(), running=True)
    except BaseException:
        running.choices.close()
        raise
    queued = running.events.response
    tasks.work_on(running)
    return _stream(store, running.id, -1) if stream else json_response(queued)


def _stream(store: Store, response_id: str, after: int) -> Response:
    return StreamingResponse(follow(store, response_id, after), headers=_STREAM_HEADERS, media_type=EVENT_STREAM)


def _current(response: StoredResponse) -> dict[str, Any]:
    """The body of a response, which has failed if nobody works on it any more."""
    body: dict[str, Any] = msgspec.json.decode(response.body)
    return failed(body, ABANDONED) if response.abandoned else body


async def _all_items(store: Store, response_id: str) -> list[dict[str, Any]]:
    await store.responses.get(response_id)
    items: list[dict[str, Any]] = []
    turns = await store.responses.turns(response_id)
    for turn in turns:
        items += msgspec.json.decode(turn.input)
        if turn is not turns[-1]:
            items += msgspec.json.decode(turn.body)["output"]
    return items
