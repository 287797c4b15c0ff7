"""The life of an API process: it serves, says when it is ready and that it lives, and drains at SIGTERM.

Knows nothing about HTTP but that something serves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from typing import Protocol

from quire.errors import EngineDeadError
from quire.foundation.messages.from_engine import Ready
from quire.foundation.processes.launch import PULSE_S, Pulse, SendReport, StatusReport

logger = logging.getLogger(__name__)

ENGINE_WAIT_S = 2.0
"""How long a new API process lets clients wait for an engine that should be there, in seconds."""


class HttpServer(Protocol):
    """Serves connections; uvicorn's is one.

    Attributes:
        started: Whether it does.
        should_exit: Set to end it.
    """

    started: bool
    should_exit: bool

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on these until it should exit."""
        ...


class Served(Protocol):
    """What answers requests: a session, or whatever has one. See EngineSession."""

    def start(self) -> None:
        """Begin to receive."""
        ...

    async def wait_ready(self) -> Ready:
        """Until requests are served."""
        ...

    async def wait_dead(self) -> None:
        """Until they can be no more."""
        ...

    async def drain(self, timeout: float) -> bool:
        """Take no new work and wait for the open; returns whether all of it ended by itself."""
        ...


async def serve_until_end(
    http: HttpServer,
    session: Served,
    listener: socket.socket,
    shutdown_timeout: float,
    report: SendReport,
    *,
    replaces: bool,
) -> None:
    """Serve until SIGTERM, then until open requests have ended or their time is over; or until the engine is gone.

    Args:
        http: What serves connections.
        session: Of its requests.
        listener: Where clients connect.
        shutdown_timeout: What open requests get after SIGTERM, in seconds.
        report: Reaches the supervisor.
        replaces: Whether another API process was here before.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    session.start()
    if replaces:  # the engine is there already, as a rule: clients wait for it better than they try again
        with contextlib.suppress(TimeoutError, EngineDeadError):
            await asyncio.wait_for(session.wait_ready(), ENGINE_WAIT_S)
    serving = loop.create_task(http.serve(sockets=[listener]))
    try:
        while not http.started and not serving.done():
            await asyncio.sleep(0.005)
        reporting = loop.create_task(_report_ready(session, report))
        pulse = loop.create_task(_report_pulse(report))
        await _until_end(session, stopping, serving)
        reporting.cancel()
        if stopping.is_set() and not await session.drain(shutdown_timeout):
            logger.warning("Requests that were still open after %g s were ended.", shutdown_timeout)
        pulse.cancel()
    finally:
        http.should_exit = True
        await serving


async def _report_ready(session: Served, report: SendReport) -> None:
    """Report `ready` once requests are served: HTTP is up already, so that is when the engine is ready."""
    with contextlib.suppress(EngineDeadError):
        ready = await session.wait_ready()
        report(StatusReport("ready", kv_tokens=ready.kv_tokens))


async def _report_pulse(report: SendReport) -> None:
    """Say that the event loop turns."""
    while True:
        report(Pulse())
        await asyncio.sleep(PULSE_S)


async def _until_end(session: Served, stopping: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Until SIGTERM, the engine's death, or the end of the HTTP server."""
    ends = [asyncio.ensure_future(stopping.wait()), asyncio.ensure_future(session.wait_dead())]
    await asyncio.wait([*ends, serving], return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    await asyncio.gather(*ends, return_exceptions=True)
