"""GET /health, /ping, /version, /load, /metrics and /engine/frames: what probes, dashboards and the page ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.engine.metrics.gpus import GpuReader
from quire.engine.metrics.prometheus import CONTENT_TYPE, Exposition
from quire.engine.metrics.server_stats import ServerStats
from quire.errors import OverloadedError, QuireError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import CLIENT_SHIFT, NONE_SEEN
from quire.serving.api.error_responses import RETRY_AFTER_S
from quire.serving.api.serving import Serving, json_response
from quire.serving.api.session.session import EngineSession
from quire.serving.api.stream_response import StreamResponse
from quire.version import __version__

logger = logging.getLogger(__name__)
FRAME_S = 0.5
MAX_VIEWERS = 16
ANSWER_S = 5.0
"""An engine that does not answer for so long, in a long step perhaps, is left out of a frame."""
LOOK_AGAIN_S = 10
_ENDED = ("draining", "dead")


def add_monitoring(app: FastAPI, serving: Serving) -> None:
    config = serving.config
    max_loras = config.lora.max_loras if config.lora.enable_lora else 0
    exposition = Exposition(serving.session.stats, serving.names[0], config.cache, max_loras)
    engines, ranks = config.parallel.data_parallel_size, config.parallel.ranks
    gpus = GpuReader(engines, ranks=ranks) if config.device.device == "cuda" else None

    app.state.engine_frames = frames = EngineFrames(serving.session)

    def answer(complaint: str) -> Response:
        state, engines = serving.session.state, serving.session.engines.states
        several = {"engines": engines} if len(engines) > 1 else {}
        if not complaint:
            return json_response({"status": "ok", "state": state, **several})
        response = json_response({"status": "unavailable", "state": state, "reason": complaint, **several}, 503)
        response.headers.update({"Retry-After": RETRY_AFTER_S, "X-Quire-State": state})
        return response

    @app.get("/health", tags=["state"])
    @app.head("/health", include_in_schema=False)
    @app.get("/ping", tags=["state"])
    @app.post("/ping", include_in_schema=False)
    async def health() -> Response:
        """200 while the server is alive and makes progress, else 503 and the reason. Of several engines it is enough
        that one does; `engines` has each one's state."""
        return answer(serving.session.status.health_complaint)

    @app.get("/ready", tags=["state"])
    @app.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        """200 while a request would be accepted and finished, else 503 and the reason; `engines` as in /health."""
        return answer(serving.session.status.readiness_complaint)

    @app.get("/version", tags=["state"])
    async def version() -> Response:
        """The version of Quire."""
        return json_response({"version": __version__})

    @app.get("/load", tags=["state"])
    async def load() -> Response:
        """Sequences that are open."""
        counts = await serving.session.counts_of_all()
        return json_response({"server_load": counts["sequences"]})

    @app.get("/metrics", tags=["state"])
    async def metrics() -> Response:
        """All metrics in Prometheus' text format."""
        if gpus is not None:
            serving.session.stats.gpus = await asyncio.to_thread(gpus.read)
        return Response(exposition.text(await serving.counts.total()), media_type=CONTENT_TYPE)

    @app.get("/engine/frames", tags=["state"])
    async def engine_frames() -> Response:
        """What the engines hold, twice a second: events `frame`, and `end` when the server shuts down. Numbers and ids
        only, no text of any request."""
        return StreamResponse(frames.view(), serving.slow_reader_s)


def metrics_app(stats: ServerStats, config: Config) -> Starlette:
    """An application with the route /metrics alone, for `quire run-batch --enable-metrics`."""
    exposition = Exposition(stats, config.model.names[0], config.cache)

    async def metrics(request: Request) -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE)

    return Starlette(routes=[Route("/metrics", metrics)])


class EngineFrames:
    """Asks all engines for a frame every FRAME_S seconds as long as somebody looks."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self._viewers: set[FrameStream] = set()
        self._asking: asyncio.Task[None] | None = None
        self._numbers: dict[int, int] = {}  # of each engine's last frame

    def view(self) -> FrameStream:
        """A new viewer's stream, to be closed at its end; raises OverloadedError if MAX_VIEWERS look already."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise OverloadedError(
                f"{MAX_VIEWERS} pages look at the engine already. Close one, or look again later.",
                retry_after_s=LOOK_AGAIN_S,
            )
        stream = FrameStream(self._leave)
        self._viewers.add(stream)
        self._numbers = {}  # the next frame begins with the whole map
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        return stream

    def _leave(self, stream: FrameStream) -> None:
        self._viewers.discard(stream)
        if not self._viewers and self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _ask(self) -> None:
        """Ask until nobody looks, or the server comes to its end."""
        shown = ""
        try:
            while (state := self._session.state) not in _ENDED:
                engines = await self._new_frames()
                if engines or state != shown:
                    self._show(_event("frame", picture({"state": state, "engines": engines})))
                shown = state
                await asyncio.sleep(FRAME_S)
        except Exception:
            logger.exception("The live picture ends.")
        self._show(_event("end", msgspec.json.encode({"state": self._session.state})), last=True)

    def _show(self, data: bytes, *, last: bool = False) -> None:
        for stream in self._viewers:
            stream.show(data, last=last)

    async def _new_frames(self) -> list[dict[str, Any]]:
        """The frames of engines that have a newer one than was shown."""
        numbers = self._numbers
        all_stats = self._session.stats.engines
        asked = await asyncio.gather(
            *(self._ask_one(stats.engine, numbers.get(stats.engine, NONE_SEEN)) for stats in all_stats)
        )
        engines: list[dict[str, Any]] = []
        for stats, value in zip(all_stats, asked, strict=True):
            if "counts" in value:
                numbers[stats.engine] = value["number"]
                engines.append({"engine": stats.engine, "generated_tokens": stats.generation_tokens, **value})
        return engines

    async def _ask_one(self, engine: int, seen: int) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ANSWER_S):
                return (await self._session.engines[engine].connection.control("frame", {"seen": str(seen)})).value
        except (QuireError, TimeoutError):
            return {}


class FrameStream:
    """Writes one viewer's server-sent events. A viewer that reads slowly misses frames."""

    media_type = "text/event-stream"

    def __init__(self, leave: Callable[[FrameStream], None]) -> None:
        self.finished = False
        self._leave = leave
        self._news = asyncio.Event()
        self._data = b""
        self._last = False

    def show(self, data: bytes, *, last: bool) -> None:
        """Put the newest event in place of one that was not read."""
        self._data, self._last = data, last
        self._news.set()

    async def wait(self) -> None:
        """Return at once, because the response begins at once."""

    async def next(self, write_now: Callable[[bytes], bool]) -> bytes:
        await self._news.wait()
        self._news.clear()
        self.finished = self._last
        return self._data

    def close(self) -> None:
        self._leave(self)


def picture(frame: dict[str, Any]) -> bytes:
    """A frame as JSON. Ids of requests become texts, because JavaScript has no integers of 64 bits."""
    for engine in frame["engines"]:
        for rows in (engine["running"], engine["waiting"]):
            rows["id"] = [_name(number) for number in rows["id"]]
        engine["tables"] = [(_name(number), first, blocks) for number, first, blocks in engine["tables"]]
    return msgspec.json.encode(frame)


def _name(number: int) -> str:
    client, sequence = number >> CLIENT_SHIFT, number & ((1 << CLIENT_SHIFT) - 1)
    return f"{client}.{sequence}"


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
