"""/metrics alone, for `quire run-batch --enable-metrics`."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.engine.metrics.prometheus import CONTENT_TYPE, Exposition
from quire.engine.metrics.server_stats import ServerStats
from quire.foundation.config import Config


def metrics_app(stats: ServerStats, config: Config) -> Starlette:
    """An application with the one route.

    Args:
        stats: What it shows.
        config: Resolved settings.
    """
    names = config.model.served_model_name or (config.model.model,)
    exposition = Exposition(stats, names[0], config.cache)

    async def metrics(request: Request) -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE)

    return Starlette(routes=[Route("/metrics", metrics)])
