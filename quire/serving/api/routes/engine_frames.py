"""GET /engine/frames: the live picture of the engines as server-sent events."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from quire.serving.api.engine_frames import EngineFrames
from quire.serving.api.serving import Serving
from quire.serving.api.stream_response import StreamResponse


def add_engine_frames(app: FastAPI, serving: Serving) -> None:
    """Add the route to the application."""
    app.state.engine_frames = frames = EngineFrames(serving.session)

    @app.get("/engine/frames", tags=["state"])
    async def engine_frames() -> Response:
        """What the engines hold, twice a second: events `frame`, and `end` when the server shuts down. Numbers and ids
        only, no text of any request."""
        return StreamResponse(frames.view(), serving.slow_reader_s)
