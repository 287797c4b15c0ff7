"""GET /debug/counts, for leak tests; mounted in developer mode only."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from quire.api.serving import Serving, json_response


def add_debug(app: FastAPI, serving: Serving) -> None:
    """What is held."""

    @app.get("/debug/counts", tags=["debug"])
    async def counts() -> Response:
        """What this process and the engine hold right now."""
        done = await serving.session.control("counts")
        return json_response({"api": serving.session.counts(), "engine": done.value})
