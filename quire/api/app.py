"""The HTTP application of one API process: routes, middleware, lifespan.

Owns how the parts are put together. Knows nothing about models; never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic.json_schema import models_json_schema

from quire.api.auth import AuthenticationMiddleware
from quire.api.body_limit import BodyLimitMiddleware
from quire.api.engine_session import EngineSession
from quire.api.error_responses import ServerErrorMiddleware, add_error_handlers
from quire.api.http_metrics import HttpMetricsMiddleware
from quire.api.prompt_renderer import PromptRenderer
from quire.api.request_ids import HEADER, RequestIdMiddleware
from quire.api.routes.chat import add_chat
from quire.api.routes.chat_page import add_page
from quire.api.routes.completions import add_completions
from quire.api.routes.debug import add_debug
from quire.api.routes.generate import add_generate
from quire.api.routes.models import add_models
from quire.api.routes.monitoring import add_monitoring
from quire.api.routes.tokenize import add_tokenize
from quire.api.schemas.chat import ChatRequest
from quire.api.schemas.completion import CompletionRequest
from quire.api.schemas.generate import GenerateRequest
from quire.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from quire.api.serving import Serving
from quire.api.stream_response import DirectSendMiddleware
from quire.clock import SystemClock
from quire.config import Config
from quire.metrics.http_counts import HttpCounts
from quire.metrics.log_line import StatsLogLine
from quire.metrics.stats import Stats
from quire.text.model_text import ModelText
from quire.version import __version__

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
SLOW_READER_S = 30.0
_ROUTES = (add_page, add_monitoring, add_models, add_completions, add_chat, add_generate, add_tokenize)
_BODIES = (ChatRequest, CompletionRequest, GenerateRequest, TokenizeRequest, DetokenizeRequest)


def create_app(
    config: Config,
    session: EngineSession,
    text: ModelText,
    *,
    developer_mode: bool = False,
    slow_reader_s: float = SLOW_READER_S,
) -> FastAPI:
    """The application.

    Args:
        config: Resolved settings.
        session: To the engine; started and closed with the application.
        text: The model's tokenizer, chat template and defaults.
        developer_mode: Also serve debug routes.
        slow_reader_s: A streaming client that reads nothing for so many seconds is disconnected.
    """
    server = config.server
    serving = Serving(config, session, text, PromptRenderer(text), int(time.time()), slow_reader_s)
    documented = not server.disable_fastapi_docs
    app = FastAPI(
        title="Quire",
        version=__version__,
        root_path=server.root_path,
        lifespan=lambda _: _lifespan(serving),
        docs_url="/docs" if documented else None,
        redoc_url="/redoc" if documented else None,
        openapi_url="/openapi.json" if documented else None,
        redirect_slashes=False,  # after a 307 some clients do not send the body again
    )
    for add_routes in _ROUTES:
        add_routes(app, serving)
    if developer_mode:
        add_debug(app, serving)
    add_error_handlers(app)
    _add_middleware(app, config, session.stats.http)
    _document_bodies(app)
    return app


def _add_middleware(app: FastAPI, config: Config, counts: HttpCounts) -> None:
    """From the inside out: the last one added gets a request first."""
    server = config.server
    app.add_middleware(BodyLimitMiddleware, max_bytes=server.max_request_bytes)
    app.add_middleware(AuthenticationMiddleware, keys=server.api_key, routes=app.router.routes)
    app.add_middleware(ServerErrorMiddleware)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=server.allowed_origins,
        allow_methods=server.allowed_methods,
        allow_headers=server.allowed_headers,
        allow_credentials=server.allow_credentials,
        expose_headers=[HEADER],
    )
    app.add_middleware(HttpMetricsMiddleware, counts=counts, clock=SystemClock())
    app.add_middleware(RequestIdMiddleware, always_answer=server.enable_request_id_headers)
    app.add_middleware(DirectSendMiddleware)


@contextlib.asynccontextmanager
async def _lifespan(serving: Serving) -> AsyncIterator[None]:
    serving.session.start()
    log = not serving.config.server.disable_log_stats
    logging_stats = asyncio.create_task(_update_rates(serving.session.stats, log=log))
    try:
        yield
    finally:
        logging_stats.cancel()
        serving.renderer.close()
        await serving.session.close()


async def _update_rates(stats: Stats, *, log: bool) -> None:
    """Update the rates, and log them."""
    lines = StatsLogLine(stats, time.monotonic())
    while True:
        await asyncio.sleep(LOG_EVERY_S)
        line = lines.since_last(time.monotonic())
        if line and log:
            logger.info("%s", line)


def _document_bodies(app: FastAPI) -> None:
    """Add the schemas of request bodies to the OpenAPI document, because routes read their bodies themselves."""
    default_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        document = default_openapi()
        _, schemas = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas.get("$defs", {}))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
