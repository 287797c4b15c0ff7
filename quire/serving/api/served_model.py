"""All that this process has of one model: settings, text, session, routes.

A request belongs to the model whose application it enters, from its head to its last byte: everything that answers it
is found through that application. Knows nothing about other models.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from fastapi import FastAPI
from fastapi.dependencies import models as dependency_models

from quire.engine.metrics.server_stats import ServerStats
from quire.engine.transport import ZmqClient
from quire.foundation.processes.launch import LaunchConfig, Recovery, Report, SendReport
from quire.serving.api.peers import Peers, SharedCounts
from quire.serving.api.request_traces import RequestTraces
from quire.serving.api.session.receivers import EventLoopReceiver
from quire.serving.api.session.session import EngineSession
from quire.text.model_text import load_model_text

MakeApp = Callable[..., FastAPI]
"""Makes the application of a model, as `create_app` does."""
FAREWELL_S = 5.0
"""How long requests that were ended have to tell their clients, in seconds."""


class ServedModel:
    """A model behind its engines.

    Args:
        launch: Its settings, its engines and their directory.
        session: The session with its engines.
        app: Answers its requests.
    """

    def __init__(self, launch: LaunchConfig, session: EngineSession, app: FastAPI) -> None:
        self.launch = launch
        self.generation = launch.generation
        self.session = session
        self.app = app
        self._open = contextlib.AsyncExitStack()
        self._is_open = False
        self._num_answering = 0
        self._unused = asyncio.Event()
        self._unused.set()

    async def open(self) -> None:
        """Connect to the engines and begin what goes on beside requests; in the event loop. More calls do nothing."""
        if not self._is_open:
            self._is_open = True
            await self._open.enter_async_context(self.app.router.lifespan_context(self.app))

    async def close(self) -> None:
        """End requests that are still open, and disconnect. More calls do nothing."""
        await self._open.aclose()
        await self.session.close()
        _forget_routes()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """A context in which the application answers a request."""
        self._num_answering += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._num_answering -= 1
            if not self._num_answering:
                self._unused.set()

    async def release(self, timeout: float) -> None:
        """Wait until what is open has ended, and disconnect from the engines. New requests go elsewhere already; what
        is still open after `timeout` seconds is ended. Batches go on where the store is read next."""
        self.session.begin_swap()
        if (batches := getattr(self.app.state, "batches", None)) is not None:
            await batches.close()
        try:
            async with asyncio.timeout(timeout):
                while self._num_answering or self.session.num_sequences:
                    await self._unused.wait()
                    await self.session.wait_idle()
        except TimeoutError:
            self.session.retire()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._unused.wait(), FAREWELL_S)
        self.session.retire()
        await self.session.close()


def _forget_routes() -> None:
    """FastAPI remembers route functions for the life of the process, in caches by function, and with these whatever
    they hold: session, tokenizer, application."""
    for cached in vars(dependency_models).values():
        if callable(clear := getattr(cached, "cache_clear", None)):
            clear()


def make_served_model(
    launch: LaunchConfig,
    report: SendReport,
    make_app: MakeApp,
    traces: RequestTraces | None,
    before: ServerStats | None = None,
    swaps: object = None,
) -> ServedModel:
    """Read what belongs to a model, and put its application together.

    Args:
        launch: See ServedModel.
        report: Reaches the supervisor.
        make_app: Makes the application.
        traces: Where finished requests are traced.
        before: Statistics of the model before this one, whose counts for the process go on.
        swaps: What the application is given to swap models.

    Raises:
        SetupError: A file is broken or missing, or a setting cannot be meant.
    """
    text = load_model_text(launch.config)
    clients = [ZmqClient(Path(launch.directory), launch.number, engine) for engine in launch.engines]
    directory, count = Path(launch.directory).parent, launch.config.server.api_server_count
    peers = Peers(launch.place, count, directory, launch.number)

    def report_of_model(what: Report) -> None:
        report(msgspec.structs.replace(what, generation=launch.generation) if isinstance(what, Recovery) else what)

    session = EngineSession(
        clients,
        launch.config,
        text.eos_ids,
        special_tokens=text.special_tokens,
        report=report_of_model,
        make_receiver=lambda client, *rest: EventLoopReceiver(clients[client.engine.engine], *rest),
        peers=peers,
    )
    if before is not None:
        session.stats.continue_counts(before)
    session.stats.api_restarts = launch.restarts
    app = make_app(
        launch.config,
        session,
        text,
        developer_mode=launch.developer_mode,
        traces=traces,
        swaps=swaps,
        counts=SharedCounts(session.stats, peers),
        created=launch.created or None,
    )
    return ServedModel(launch, session, app)
