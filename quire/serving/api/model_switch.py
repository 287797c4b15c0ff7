"""All that this process has of its models, and the ASGI application that hands each request to the served one.

A request belongs to the model whose application it enters, from its head to its last byte.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from fastapi import FastAPI
from fastapi.dependencies import models as dependency_models
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.client import ZmqClient
from quire.engine.metrics.server_stats import ServerStats
from quire.foundation.processes.launch import LaunchConfig, Recovery, Report, SendReport
from quire.serving.api.peers import Peers, SharedCounts
from quire.serving.api.request_traces import RequestTraces
from quire.serving.api.session.receivers import EventLoopReceiver
from quire.serving.api.session.session import EngineSession
from quire.text.model_text import load_model_text

ADMIN_PATH = "/admin/model"
"""The path of the process itself: a client that waits here for the end of a swap is no open request of a model."""
MAX_WAITING = 4_096
"""Maximum number of requests that wait, each of which holds a connection. Others are let through, to be refused."""
FAREWELL_S = 5.0
"""Seconds that requests that were ended have to tell their clients."""
MakeApp = Callable[..., FastAPI]
"""Makes the application of a model, as `create_app` does."""


class ModelSwitch:
    """Hands requests to models; connections belong to the process. `others` are not served yet, or not any more."""

    def __init__(self, first: ServedModel) -> None:
        self.current = first
        self.others: list[ServedModel] = []
        self._counts = first.session.stats.swaps
        self._let_in = asyncio.Event()
        self._let_in.set()
        self._patience_s = 0.0
        self._switched = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        if scope["path"].endswith(ADMIN_PATH):
            await self.current.app(scope, receive, send)
            return
        if self.holds and _wants_a_model(scope):
            await self._wait()
        model = self.current
        with model.answering():
            app: ASGIApp = model.app
            await app(scope, receive, send)

    @property
    def holds(self) -> bool:
        """Whether requests for a model wait, because none serves."""
        return not self._let_in.is_set()

    @property
    def num_waiting(self) -> int:
        return self._counts.waiting

    def hold(self, patience_s: float) -> None:
        """Let requests for a model wait until `let_in`, each for at most `patience_s` seconds."""
        self._patience_s = patience_s
        self._let_in.clear()

    def let_in(self) -> None:
        """Let all requests that wait go on."""
        self._let_in.set()

    async def _wait(self) -> None:
        """Wait until requests are let in, or the request's patience is over: then whoever gets it refuses it."""
        if self.num_waiting >= MAX_WAITING:
            return
        self._counts.waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._let_in.wait(), self._patience_s)
        finally:
            self._counts.waiting -= 1

    def serve(self, model: ServedModel) -> ServedModel:
        """Give new requests to this model. Returns the model before, which is among the others from now on."""
        before, self.current = self.current, model
        self.others = [before, *(other for other in self.others if other is not model)]
        self._switched.set()
        self._switched = asyncio.Event()
        return before

    async def forget(self, model: ServedModel) -> None:
        """Close one of the others."""
        await model.close()
        self.others = [other for other in self.others if other is not model]

    async def wait_dead(self) -> None:
        """Wait until the engine of the served model is dead and is not replaced."""
        dead = False
        while not dead:
            waiting = self.current.session.wait_dead(), self._switched.wait()
            ends = [asyncio.ensure_future(each) for each in waiting]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                dead = ends[0].done() and not ends[1].done()
            finally:
                for end in ends:
                    end.cancel()

    async def drain(self, timeout: float) -> bool:
        """Drain the sessions of all models; see EngineSession.drain. Requests that wait for a model are refused."""
        self.let_in()
        while self.num_waiting:
            await asyncio.sleep(0)
        models = (self.current, *self.others)
        return all(await asyncio.gather(*(model.session.drain(timeout) for model in models)))

    @property
    def num_sequences(self) -> int:
        """Sequences of all models that have not ended."""
        return sum(model.session.num_sequences for model in (self.current, *self.others))

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The lifespan protocol: from the server's start to its end."""
        await receive()
        await self.current.open()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for model in (self.current, *self.others):
            await model.close()
        await send({"type": "lifespan.shutdown.complete"})


def _wants_a_model(scope: Scope) -> bool:
    """Whether only an engine can answer. What is only read is there without one, and so are probes."""
    return scope["type"] == "http" and scope["method"] == "POST" and not scope["path"].endswith("/ping")


class ServedModel:
    """A model with its settings, the session with its engines, and the application that answers its requests."""

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
        """Wait until what is open has ended, and disconnect from the engines. New requests go elsewhere already. What
        is open after `timeout` seconds is ended. Batches go on where the store is read next."""
        self.session.begin_swap()
        if (batches := getattr(self.app.state, "batches", None)) is not None:
            await batches.close()
        try:
            async with asyncio.timeout(timeout):
                while self._num_answering or self.session.num_sequences:
                    await self._unused.wait()
                    await self.session.requests.wait_idle()
        except TimeoutError:
            self.session.retire()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._unused.wait(), FAREWELL_S)
        self.session.retire()
        await self.session.close()


def _forget_routes() -> None:
    """Clear FastAPI's caches by route function, which would keep a model's session for the life of the process."""
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
    """Read what belongs to a model, and put its application together; raises SetupError if that cannot be done.

    The counts of `before`, the model before this one, go on.
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
