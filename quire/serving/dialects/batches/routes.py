"""/v1/files, and /v1/batches: requests from a file, answered when there is room beside interactive ones."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Query
from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from quire.errors import RequestError
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.schemas.known_fields import Body, Part
from quire.serving.api.schemas.sampling import Metadata
from quire.serving.api.serving import Serving, json_response
from quire.serving.dialects.batches.requests import ENDPOINTS, BatchCalls
from quire.serving.dialects.batches.runner import BatchRunner
from quire.serving.store.files import PART_BYTES, StoredFile
from quire.serving.store.store import Store

MAX_PAGE = 100
UPLOAD_TIMEOUT_S = 600.0
MAX_FILENAME = 255
MAX_FILES_PAGE = 10_000
_PURPOSE = "batch"
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [_PURPOSE]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                }
            }
        },
    }
}
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_SECONDS = {"m": 60, "h": 3_600, "d": 86_400}


class OutputExpiresAfter(Part):
    """When the output files are deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3_600, le=2_592_000)


class BatchRequest(Body):
    """Requests to answer when there is time."""

    input_file_id: str = Field(description="A file of purpose 'batch', with a request a line.")
    endpoint: str = Field(
        description=f"Where all of its requests go: {', '.join(ENDPOINTS)}.", json_schema_extra={"enum": [*ENDPOINTS]}
    )
    completion_window: str = Field(
        description="Time for it, as '24h', '30m' or '7d'; what is left then has expired.",
        json_schema_extra={"pattern": f"^{_WINDOW.pattern}$"},
    )
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None

    @property
    def seconds(self) -> int:
        """The completion window in seconds; raises RequestError if it is no time."""
        match = _WINDOW.fullmatch(self.completion_window)
        if match is None:
            raise RequestError("completion_window must be a time such as '24h'.", param="completion_window")
        return int(match[1]) * _SECONDS[match[2]]


def make_batch_runner(app: FastAPI, serving: Serving, store: Store) -> BatchRunner:
    server = serving.config.server
    calls = BatchCalls(app, server.api_key, serving.session, serving.config.scheduler)
    return BatchRunner(store, calls, serving.session, serving.names, server.max_request_bytes)


def add_batches(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/batches", openapi_extra=openapi_body(BatchRequest), tags=["batches"])
    async def create(request: Request) -> Response:
        """Begin a batch."""
        fields = await read_body(request, BatchRequest)
        if fields.endpoint not in ENDPOINTS:
            raise RequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
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


def add_files(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/files", openapi_extra=_BODY, tags=["files"])
    async def upload(request: Request) -> Response:
        """Upload the requests of a batch: a file with one JSON object a line."""
        files = serving.stored.files
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise HTTPException(415, "Send the file as multipart/form-data, with the fields 'file' and 'purpose'.")
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S), request.form(max_files=1, max_fields=16) as form:
                file, lifetime = _file(form), _lifetime(form)
                name = (file.filename or "upload")[:MAX_FILENAME]
                stored = await files.create(name, _PURPOSE, _parts(file), lifetime)
        except TimeoutError:
            raise HTTPException(408, "The file did not arrive in time.") from None
        except ClientDisconnect:
            raise RequestError("The upload broke off.") from None
        return json_response(_card(stored))

    @app.get("/v1/files", tags=["files"])
    async def all_files(
        purpose: str | None = None,
        after: str | None = None,
        limit: int = Query(MAX_FILES_PAGE, ge=1, le=MAX_FILES_PAGE),
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """A page of all files."""
        found, more = await serving.stored.files.page(purpose=purpose, after=after, limit=limit, order=order)
        return json_response(page_body([_card(file) for file in found], more))

    @app.get("/v1/files/{file_id}", tags=["files"])
    async def one_file(file_id: str) -> Response:
        """What is known about a file."""
        return json_response(_card(await serving.stored.files.get(file_id)))

    @app.get("/v1/files/{file_id}/content", tags=["files"])
    async def content(file_id: str) -> Response:
        """The file itself."""
        file = await serving.stored.files.get(file_id)
        headers = {"Content-Length": str(file.size), "X-Content-Type-Options": "nosniff"}
        parts = serving.stored.files.parts(file_id)
        return StreamingResponse(parts, headers=headers, media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}", tags=["files"])
    async def delete(file_id: str) -> Response:
        """Delete a file."""
        await serving.stored.files.delete(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


def page_body(cards: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    """OpenAI's list."""
    first, last = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
    return {"object": "list", "data": list(cards), "first_id": first, "last_id": last, "has_more": more}


def _card(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created,
        "expires_at": file.expires,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _file(form: FormData) -> UploadFile:
    purpose, file = form.get("purpose"), form.get("file")
    if not isinstance(file, UploadFile):
        raise RequestError("'file' is required, as a file.", param="file")
    if purpose != _PURPOSE:
        raise RequestError(f"purpose must be '{_PURPOSE}': other files have no use here.", param="purpose")
    return file


def _lifetime(form: FormData) -> float | None:
    """`expires_after` in seconds; None without it."""
    seconds, anchor = form.get("expires_after[seconds]"), form.get("expires_after[anchor]")
    if seconds is None and anchor is None:
        return None
    if anchor != "created_at":
        raise RequestError("expires_after.anchor must be 'created_at'.", param="expires_after.anchor")
    if not isinstance(seconds, str) or not seconds.isdecimal() or not 3_600 <= int(seconds) <= 2_592_000:
        raise RequestError("expires_after.seconds must be between 3600 and 2592000.", param="expires_after.seconds")
    return float(seconds)


async def _parts(file: UploadFile) -> AsyncIterator[bytes]:
    while part := await file.read(PART_BYTES):
        yield part
