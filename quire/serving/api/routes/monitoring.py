"""GET /health, /ping, /version, /load, /metrics and /engine/frames: what probes, dashboards and the page ask."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.engine.metrics.gpus import GpuReader
from quire.engine.metrics.prometheus import CONTENT_TYPE, Exposition
from quire.engine.metrics.server_stats import ServerStats
from quire.foundation.config import Config
from quire.serving.api.engine_frames import EngineFrames
from quire.serving.api.error_responses import RETRY_AFTER_S
from quire.serving.api.serving import Serving, json_response
from quire.serving.api.stream_response import StreamResponse
from quire.version import __version__


def add_monitoring(app: FastAPI, serving: Serving) -> None:
    """Add the routes to the application."""
    config = serving.config
    max_loras = config.lora.max_loras if config.lora.enable_lora else 0
    exposition = Exposition(serving.session.stats, serving.names[0], config.cache, max_loras)
    engines, ranks = config.parallel.data_parallel_size, config.parallel.ranks
    gpus = GpuReader(engines, ranks=ranks) if config.device.device == "cuda" else None

    app.state.engine_frames = frames = EngineFrames(serving.session)

    def answer(complaint: str) -> Response:
        state, engines = serving.session.state, serving.session.engine_states
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
        return answer(serving.session.health_complaint)

    @app.get("/ready", tags=["state"])
    @app.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        """200 while a request would be accepted and finished, else 503 and the reason; `engines` as in /health."""
        return answer(serving.session.readiness_complaint)

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
    names = config.model.served_model_name or (config.model.model,)
    exposition = Exposition(stats, names[0], config.cache)

    async def metrics(request: Request) -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE)

    return Starlette(routes=[Route("/metrics", metrics)])
