"""A proxy between unmodified clients and a server: what was sent and what came back is kept, byte by byte."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

_HOP_BY_HOP = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}


@dataclass
class Exchange:
    """A request and its response.

    Attributes:
        sent: The request's body; None if it had none.
        received: The response's body.
    """

    method: str
    path: str
    headers: dict[str, str]
    sent: Any
    status: int = 0
    content_type: str = ""
    received: bytearray = field(default_factory=bytearray)

    @property
    def has_key(self) -> bool:
        """Whether the client sent an API key, right or wrong."""
        return not {"authorization", "x-api-key"}.isdisjoint(self.headers)

    @property
    def streamed(self) -> bool:
        """Whether the response came in parts."""
        return self.content_type in ("text/event-stream", "application/x-ndjson")

    @property
    def body(self) -> Any:
        """The response that came whole."""
        return json.loads(bytes(self.received))

    @property
    def events(self) -> list[tuple[str, str]]:
        """Name and data of each server-sent event."""
        found = []
        for block in self.received.decode().split("\n\n")[:-1]:
            lines = dict(line.split(": ", 1) for line in block.splitlines())
            found.append((lines.get("event", ""), lines["data"]))
        return found


class Recorder:
    """A running proxy; a context that ends it.

    Attributes:
        url: Its address.
        exchanges: In the order of the requests.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self.exchanges: list[Exchange] = []
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        methods = ["GET", "POST", "DELETE", "HEAD"]
        app = Starlette(routes=[Route("/{path:path}", self._pass_on, methods=methods)])
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="critical"))
        async with httpx.AsyncClient(base_url=self._server, timeout=120) as self._client:
            serving = asyncio.create_task(self._uvicorn.serve())
            while not self._uvicorn.started:
                await asyncio.sleep(0.005)
            self.url = f"http://127.0.0.1:{self._uvicorn.servers[0].sockets[0].getsockname()[1]}"
            self._up.set()
            await serving

    async def _pass_on(self, request: Request) -> StreamingResponse:
        raw = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP}
        exchange = Exchange(request.method, request.url.path, headers, json.loads(raw) if raw else None)
        self.exchanges.append(exchange)
        sent = self._client.build_request(
            request.method, request.url.path, params=request.url.query.encode(), content=raw, headers=headers
        )
        answer = await self._client.send(sent, stream=True)
        exchange.status = answer.status_code
        exchange.content_type = answer.headers.get("content-type", "").partition(";")[0]

        async def parts() -> AsyncIterator[bytes]:
            async for part in answer.aiter_bytes():
                exchange.received += part
                yield part
            await answer.aclose()

        back = {name: value for name, value in answer.headers.items() if name not in _HOP_BY_HOP}
        return StreamingResponse(parts(), answer.status_code, back)

    def __enter__(self) -> Recorder:
        self._thread.start()
        assert self._up.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(20)
