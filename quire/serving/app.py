"""The HTTP application of one API process: its routes, middleware and lifespan. Never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.metrics.log_line import StatsLogLine
from quire.engine.metrics.server_stats import ServerStats
from quire.errors import ConfigError, QuireError, RequestError
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config, environment
from quire.media.model_audio import load_model_audio
from quire.media.model_media import load_model_media
from quire.serving.api.audio.chat_transcripts import ChatSpeech
from quire.serving.api.audio.routes import AUDIO_PATHS, add_audio
from quire.serving.api.audio.transcripts import Speech
from quire.serving.api.auth import CallerMiddleware, RequestIdMiddleware
from quire.serving.api.chat_parsers import choose_parsers
from quire.serving.api.chat_service import ChatService
from quire.serving.api.error_responses import ErrorMiddleware, error_response, http_error_response
from quire.serving.api.large_requests.readers import LargeRequestReaders
from quire.serving.api.media import RequestMedia
from quire.serving.api.middleware import BodyLimitMiddleware, CrossOriginMiddleware
from quire.serving.api.own_middleware import add_own_middleware
from quire.serving.api.peers import Peers, SharedCounts
from quire.serving.api.pooling.routes import add_pooling
from quire.serving.api.pooling.scoring import add_scoring
from quire.serving.api.prompt_renderer import PromptRenderer
from quire.serving.api.request_record import Observer, RequestRecordMiddleware, count_in, log_access
from quire.serving.api.request_traces import RequestTraces
from quire.serving.api.routes import chat, completions, models, monitoring, operations, pages, tokens
from quire.serving.api.routes.invocations import add_invocations
from quire.serving.api.schemas.known_fields import UnknownFields
from quire.serving.api.serving import Serving
from quire.serving.api.session.session import EngineSession
from quire.serving.dialects.anthropic.routes import add_anthropic
from quire.serving.dialects.batches.routes import add_batches, add_files, make_batch_runner
from quire.serving.dialects.cohere.routes import add_cohere
from quire.serving.dialects.decisions.routes import add_decisions
from quire.serving.dialects.ollama.routes import add_ollama
from quire.serving.dialects.responses.routes import add_responses
from quire.serving.openapi_document import document_bodies
from quire.serving.store.store import Store, open_store
from quire.text.model_text import ModelText
from quire.text.speech_tokens import load_speech_tokens
from quire.version import __version__

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
SLOW_READER_S = 30.0
SWEEP_EVERY_S = 3_600.0
UPLOAD_OVERHEAD = 2**16
"""Bytes of an upload beside its file."""
_ROUTES = (
    pages.add_page,
    pages.add_docs_pages,
    monitoring.add_monitoring,
    models.add_models,
    completions.add_completions,
    chat.add_chat,
    add_responses,
    completions.add_generate,
    add_invocations,
    add_pooling,
    add_scoring,
    add_anthropic,
    add_ollama,
    add_cohere,
    add_decisions,
    tokens.add_render,
    tokens.add_tokenize,
    add_files,
    add_batches,
    add_audio,
)


def create_app(
    config: Config,
    session: EngineSession,
    text: ModelText,
    *,
    developer_mode: bool = False,
    slow_reader_s: float = SLOW_READER_S,
    traces: RequestTraces | None = None,
    swaps: operations.Swaps | None = None,
    counts: SharedCounts | None = None,
    created: int | None = None,
) -> FastAPI:
    """The application.

    Args:
        session: The session with the engines; started and closed with the application.
        developer_mode: Also serve debug routes, and those for operators without a key.
        slow_reader_s: A streaming client that reads nothing for so many seconds is disconnected.
        traces: Where finished requests are traced; None for nowhere.
        swaps: operations.Swaps models; None if nothing does.
        counts: What /metrics shows; None for what the session counts.
        created: When the server started, in seconds since 1970; None for now.

    Raises:
        ConfigError: The store cannot be used, or settings contradict each other.
    """
    server = config.server
    if server.cache_isolation and not server.api_key and server.tenant_header is None:
        raise ConfigError(
            "--cache-isolation needs --api-key or --tenant-header: nothing else tells whose a request is.",
            param="cache_isolation",
        )
    readers = LargeRequestReaders(config)
    renderer = PromptRenderer(text, readers, server.chat_template_content_format, server.default_chat_template_kwargs)
    loaded = load_model_media(config)
    media = RequestMedia(loaded, config, readers)
    chats = ChatService(server, session, text, renderer, choose_parsers(server, text), media)
    speech = _speech(config, text, readers) or ChatSpeech.of(loaded.sounds, media, renderer)
    store = open_store(server, environment.responses_store())
    counts = counts or SharedCounts(session.stats, Peers())
    created = int(time.time()) if created is None else created
    serving = Serving(config, session, text, renderer, chats, created, slow_reader_s, counts, store, speech)
    try:
        return _with_routes(serving, readers, developer_mode, traces, swaps)
    except BaseException:  # nothing of it runs, and its lifespan would have closed these
        readers.close()
        renderer.close()
        if store is not None:
            store.close()
        raise


def _with_routes(
    serving: Serving,
    readers: LargeRequestReaders,
    developer_mode: bool,
    traces: RequestTraces | None,
    swaps: operations.Swaps | None,
) -> FastAPI:
    config, server, session = serving.config, serving.config.server, serving.session
    app = FastAPI(
        title="Quire",
        version=__version__,
        lifespan=lambda app: _lifespan(app, serving),
        docs_url=None,  # see add_docs_pages
        redoc_url=None,
        openapi_url=None if server.disable_fastapi_docs else "/openapi.json",
        redirect_slashes=False,  # after a 307 some clients do not send the body again
        telemetry={"tracing": False, "metrics": False, "logs": False},  # looked up at each request; see RequestTraces
    )
    app.root_path = server.root_path  # its argument is deprecated, and uvicorn's changes the paths that we see
    app.state.readers = readers
    app.state.unknown_fields = UnknownFields(serving.text.hints, ignored=server.unknown_fields == "ignore")
    for add_routes in _ROUTES:
        add_routes(app, serving)
    if developer_mode or server.api_key:
        operations.add_operations(app, serving)
        if swaps is not None:
            operations.add_model_admin(app, swaps)
    if config.lora.enable_lora and (developer_mode or server.api_key or environment.may_load_adapters()):
        models.add_adapters(app, serving)
    if developer_mode:
        operations.add_debug(app, serving)
    add_error_handlers(app)
    observers = [count_in(session.stats.http)]
    if not server.disable_uvicorn_access_log:
        observers.append(log_access)
    if traces is not None:
        observers.append(traces.record)
    _add_middleware(app, config, observers)
    document_bodies(app)
    return app


def _speech(config: Config, text: ModelText, readers: LargeRequestReaders) -> Speech | None:
    """What is known about a model that hears; None for all others, and without a tokenizer."""
    audio = load_model_audio(config)
    if audio is None or text.tokenizer is None:
        return None
    marks = load_speech_tokens(Path(config.model.model), text.tokenizer)
    return Speech(audio, marks, text.tokenizer, readers)


def _add_middleware(app: FastAPI, config: Config, observers: Sequence[Observer]) -> None:
    """Add middleware from the inside out: the last one added gets a request first."""
    server = config.server
    app.add_middleware(DirectRoutesMiddleware, routes=app.router.routes)
    larger = {"/v1/files": server.responses_store_max_file_bytes + UPLOAD_OVERHEAD}
    larger |= dict.fromkeys(AUDIO_PATHS, environment.max_audio_bytes() + UPLOAD_OVERHEAD)
    app.add_middleware(BodyLimitMiddleware, max_bytes=server.max_request_bytes, larger=larger)
    app.add_middleware(CallerMiddleware, config=server, routes=app.router.routes, clock=SystemClock())
    app.add_middleware(ErrorMiddleware)
    app.add_middleware(CrossOriginMiddleware, config=server)
    app.add_middleware(RequestRecordMiddleware, observers=observers, clock=SystemClock())
    add_own_middleware(app, server.middleware)
    stack = app.build_middleware_stack()  # with FastAPI's own, of which the last one is outside all of these
    app.middleware_stack = RequestIdMiddleware(
        stack, always_answer=server.enable_request_id_headers, sends_directly=not server.middleware
    )


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI, serving: Serving) -> AsyncIterator[None]:
    serving.session.start()
    log = not serving.config.server.disable_log_stats
    logging_stats = asyncio.create_task(_update_rates(serving.session.stats, log=log))
    try:
        async with contextlib.AsyncExitStack() as stack:
            if serving.store is not None:
                await stack.enter_async_context(_using_store(app, serving, serving.store))
            yield
    finally:
        logging_stats.cancel()
        serving.renderer.close()
        app.state.readers.close()
        await serving.session.close()


@contextlib.asynccontextmanager
async def _using_store(app: FastAPI, serving: Serving, store: Store) -> AsyncIterator[None]:
    """A context in which batches and responses in the background run, and what is too old is deleted."""
    app.state.batches = runner = make_batch_runner(app, serving, store)
    runner.start()
    sweeping = asyncio.create_task(_keep_sweeping(store))
    try:
        yield
    finally:
        sweeping.cancel()
        await runner.close()
        await app.state.responses.close()
        with contextlib.suppress(QuireError):
            if store.exists:
                await store.process.say_gone()
        store.close()


async def _keep_sweeping(store: Store) -> None:
    while True:
        try:
            if store.exists:
                await store.sweep()
        except QuireError as error:
            logger.warning("What is too old in the store stays: %s", error.message)
        await asyncio.sleep(SWEEP_EVERY_S)


async def _update_rates(stats: ServerStats, *, log: bool) -> None:
    named = len(stats.engines) > 1
    lines = [StatsLogLine(engine, time.monotonic(), named=named) for engine in stats.engines]
    while True:
        await asyncio.sleep(LOG_EVERY_S)
        for line in [each.since_last(time.monotonic()) for each in lines]:
            if line and log:
                logger.info("%s", line)


def add_error_handlers(app: FastAPI) -> None:
    """Let every error that a route raises leave as an OpenAI error body."""

    @app.exception_handler(QuireError)
    async def on_quire_error(request: Request, error: QuireError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        return http_error_response(error, path)

    @app.exception_handler(RequestValidationError)
    async def on_wrong_query(request: Request, error: RequestValidationError) -> Response:
        wrong = error.errors()[0]
        name = str(wrong["loc"][-1])[:64]
        what = wrong["msg"].removeprefix("Input should be ")
        return error_response(RequestError(f"{name} must be {what}.", param=name))


class DirectRoutesMiddleware:
    """Answers POSTs to endpoints that take a Request alone, by one lookup; the innermost middleware.

    FastAPI's router looks at one route after the other, and wraps an endpoint in what its dependencies would need. For
    nearly all requests that would cost as much as all the rest of turning a request away. The router gets what is not
    found here.
    """

    def __init__(self, app: ASGIApp, *, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes if isinstance(route, APIRoute) and _is_direct(route)}
        self.paths = frozenset(self._routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        try:
            response = await route.endpoint(Request(scope, receive, send))
        except QuireError as error:
            response = error_response(error)
        except HTTPException as error:
            response = http_error_response(error, scope["path"])
        await response(scope, receive, send)


def _is_direct(route: APIRoute) -> bool:
    takes = route.dependant
    given = (takes.path_params, takes.query_params, takes.header_params, takes.cookie_params, takes.body_params)
    return (
        route.methods == {"POST"} and takes.request_param_name is not None and not any(given) and not takes.dependencies
    )
