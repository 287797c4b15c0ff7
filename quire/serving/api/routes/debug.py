"""GET /debug/counts, for leak tests; mounted in developer mode only."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from quire.serving.api.serving import Serving, json_response


def add_debug(app: FastAPI, serving: Serving) -> None:
    """What is held."""

    @app.get("/debug/counts", tags=["debug"])
    async def counts() -> Response:
        """What the API processes and the engines hold right now."""
        done = await serving.session.control("counts")
        return json_response({"api": await serving.session.counts_of_all(), "engine": done.value})
