"""/v1/batches: requests from a file, answered when there is room beside interactive ones."""

from __future__ import annotations

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import Response

from quire.serving.api.in_process_calls import InProcessCalls
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.serving import Serving, json_response
from quire.serving.dialects.batches.batch_calls import BatchCalls
from quire.serving.dialects.batches.batch_runner import BatchRunner
from quire.serving.dialects.batches.file_routes import page_body
from quire.serving.dialects.batches.schemas import BatchRequest
from quire.serving.store.store import Store

MAX_PAGE = 100


def make_batch_runner(app: FastAPI, serving: Serving, store: Store) -> BatchRunner:
    """The runner of this process's batches."""
    calls = InProcessCalls(app, serving.config.server.api_key)
    batch_calls = BatchCalls(calls, serving.session, serving.config.scheduler)
    return BatchRunner(store, batch_calls, serving.session, serving.names, serving.config.server.max_request_bytes)


def add_batches(app: FastAPI, serving: Serving) -> None:
    """Batches in the store."""

    @app.post("/v1/batches", openapi_extra=openapi_body(BatchRequest), tags=["batches"])
    async def create(request: Request) -> Response:
        """Begin a batch."""
        fields = await read_body(request, BatchRequest)
        fields.check_endpoint()
        expires = fields.output_expires_after
        batch = await serving.stored.batches.create(
            model=serving.names[0],
            endpoint=fields.endpoint,
            input_file=fields.input_file_id,
            window=fields.completion_window,
            seconds=fields.seconds,
            metadata=fields.metadata,
            output_lifetime=expires.seconds if expires is not None else None,
            tenant=request.state.caller.tenant,
        )
        app.state.batches.wake()
        return json_response(batch)

    @app.get("/v1/batches", tags=["batches"])
    async def all_batches(after: str | None = None, limit: int = Query(20, ge=1, le=MAX_PAGE)) -> Response:
        """A page of all batches, the latest first."""
        return json_response(page_body(*await serving.stored.batches.page(after, limit)))

    @app.get("/v1/batches/{batch_id}", tags=["batches"])
    async def one_batch(batch_id: str) -> Response:
        """How far a batch is."""
        return json_response(await serving.stored.batches.get(batch_id))

    @app.post("/v1/batches/{batch_id}/cancel", tags=["batches"])
    async def cancel(batch_id: str) -> Response:
        """Cancel a batch; results so far can be read once it is `cancelled`."""
        batch = await serving.stored.batches.cancel(batch_id)
        app.state.batches.wake()
        return json_response(batch)
