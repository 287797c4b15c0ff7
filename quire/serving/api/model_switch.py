"""The ASGI application of this process: hands each request to the application of the model that is served."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.metrics.server_stats import SwapCounts
from quire.foundation.messages.from_engine import Ready
from quire.serving.api.served_model import ServedModel

ADMIN_PATH = "/admin/model"
"""Belongs to the process: whoever waits here for the end of a swap is no open request of a model."""


class ModelSwitch:
    """Connections are this process's, requests a model's.

    Args:
        first: The model that is served from the start.

    Attributes:
        current: Where new requests go.
        others: Models that are not served yet, or not any more.
        gate: Where requests for a model wait while none serves.
    """

    def __init__(self, first: ServedModel) -> None:
        self.current = first
        self.others: list[ServedModel] = []
        self.gate = RequestGate(first.session.stats.swaps)
        self._switched = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        if scope["path"].endswith(ADMIN_PATH):
            await self.current.app(scope, receive, send)
            return
        if self.gate.is_closed and _wants_a_model(scope):
            await self.gate.wait()
        model = self.current
        with model.answering():
            app: ASGIApp = model.app
            await app(scope, receive, send)

    def serve(self, model: ServedModel) -> ServedModel:
        """New requests go to this model; returns the one before, which is among the others from now on."""
        before, self.current = self.current, model
        self.others = [before, *(other for other in self.others if other is not model)]
        self._switched.set()
        self._switched = asyncio.Event()
        return before

    async def forget(self, model: ServedModel) -> None:
        """Close one of the others."""
        await model.close()
        self.others = [other for other in self.others if other is not model]

    # --- life, as `serve_until_end` leads it ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive; called in the event loop. More calls do nothing."""
        self.current.session.start()

    async def wait_ready(self) -> Ready:
        """What the engines can do, see EngineSession.

        Raises:
            EngineDeadError: One died instead.
        """
        return await self.current.session.wait_ready()

    async def wait_dead(self) -> None:
        """Until the engine of the served model is dead and is not replaced."""
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
        """Wait until open requests of all models have ended, see EngineSession. Who waits for a model is refused."""
        self.gate.open()
        while self.gate.num_waiting:
            await asyncio.sleep(0)
        models = (self.current, *self.others)
        return all(await asyncio.gather(*(model.session.drain(timeout) for model in models)))

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
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
    """Whether there is no answer without an engine: what is only read is there, and so are probes."""
    return scope["type"] == "http" and scope["method"] == "POST" and not scope["path"].endswith("/ping")


MAX_WAITING = 4_096
"""More are let through at once, to be refused: each that waits holds a connection."""


class RequestGate:
    """Open at first.

    Args:
        counts: Where it is counted how many wait.
    """

    def __init__(self, counts: SwapCounts) -> None:
        self._counts = counts
        self._opened = asyncio.Event()
        self._opened.set()
        self._patience_s = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether requests wait."""
        return not self._opened.is_set()

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._counts.waiting

    def close(self, patience_s: float) -> None:
        """From now on requests wait until `open`, and no longer than so many seconds each."""
        self._patience_s = patience_s
        self._opened.clear()

    def open(self) -> None:
        """All that wait go on."""
        self._opened.set()

    async def wait(self) -> None:
        """Until it is open, or the request's patience is over: then whoever it goes to refuses it."""
        if not self.is_closed or self.num_waiting >= MAX_WAITING:
            return
        self._counts.waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._opened.wait(), self._patience_s)
        finally:
            self._counts.waiting -= 1
