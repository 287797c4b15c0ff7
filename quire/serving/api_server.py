"""The API process, which the supervisor starts beside the engine (`start.py`).

Owns what it is made of (the served model and what swaps it, uvicorn on an inherited socket, event loop) and its life:
it serves, says when it is ready and that it lives, and drains at SIGTERM. Never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from pathlib import Path
from typing import Protocol

from quire.engine.metrics.histogram import WorkTimes
from quire.errors import EngineDeadError
from quire.foundation.processes import garbage
from quire.foundation.processes.child_main import do_not_interrupt_others
from quire.foundation.processes.launch import PULSE_S, LaunchConfig, Pulse, SendReport, StatusReport
from quire.foundation.processes.logs import set_up_logs
from quire.foundation.processes.shared_memory import SharedNumbers
from quire.serving.api.event_loop import MeasuredLoop, SharingLoop
from quire.serving.api.http_server import HttpServer, uvicorn_config
from quire.serving.api.model_swaps import ModelSwaps
from quire.serving.api.model_switch import MakeApp
from quire.serving.api.request_traces import open_traces
from quire.serving.api.session.session import EngineSession
from quire.serving.api.tls import load_tls
from quire.serving.app import create_app

logger = logging.getLogger(__name__)
ENGINE_WAIT_S = 2.0
"""Seconds that a new API process lets clients wait for an engine that should be there."""


def main(launch: LaunchConfig, report: SendReport, make_app: MakeApp = create_app) -> None:
    """Serve until SIGTERM, then until open requests have ended or their time is over."""
    server = launch.config.server
    prefix = f"{launch.api_name}: " if server.api_server_count > 1 else ""
    format = launch.config.observability.log_format
    set_up_logs(format, launch.api_name, logging.INFO, prefix, config_file=server.log_config_file)
    if launch.config.device.device == "cpu":
        do_not_interrupt_others()  # the engine computes on the same processors
    traces = open_traces(launch.config)
    swaps = ModelSwaps(launch, report, make_app, traces)
    models, callbacks = swaps.switch, swaps.switch.current.session.stats.callbacks
    http = HttpServer(uvicorn_config(models, server))
    load_tls(http.config)
    if server.uvicorn_log_level == "info":  # uvicorn's own start and stop lines: the supervisor prints these
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    listener = socket.socket(fileno=launch.listen_fd)
    with listener, asyncio.Runner(loop_factory=lambda: _event_loop(launch, callbacks)) as runner:
        runner.run(
            serve_until_end(
                http,
                swaps,
                listener,
                server.shutdown_timeout,
                garbage.collecting(report, lambda: models.num_sequences),
                replaces=launch.restarts > 0,
            )
        )
    if traces is not None:
        traces.close()


def _event_loop(launch: LaunchConfig, callbacks: WorkTimes) -> MeasuredLoop:
    count = launch.config.server.api_server_count
    if count == 1:
        return MeasuredLoop(callbacks)
    path = Path(launch.directory).parent / "connections"
    return SharingLoop(callbacks, SharedNumbers(path, launch.place, count))


class ConnectionServer(Protocol):
    """Serves connections, as uvicorn does, once it has `started` and until it `should_exit`."""

    started: bool
    should_exit: bool

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on these sockets until it should exit."""


async def serve_until_end(
    http: ConnectionServer,
    session: EngineSession | ModelSwaps,
    listener: socket.socket,
    shutdown_timeout: float,
    report: SendReport,
    *,
    replaces: bool,
) -> None:
    """Serve until the engine is gone, or until SIGTERM and then until open requests have ended or their time is over.

    A process that `replaces` another one lets clients wait for an engine that should be there.
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


async def _report_ready(session: EngineSession | ModelSwaps, report: SendReport) -> None:
    """Report `ready` once requests are served. HTTP is up already, so that is when the engine is ready."""
    with contextlib.suppress(EngineDeadError):
        ready = await session.wait_ready()
        pools = "" if ready.pooling.generates else ready.pooling.tasks[0]
        report(StatusReport("ready", kv_tokens=ready.kv_tokens, pools=pools))


async def _report_pulse(report: SendReport) -> None:
    while True:
        report(Pulse())
        await asyncio.sleep(PULSE_S)


async def _until_end(session: EngineSession | ModelSwaps, stopping: asyncio.Event, serving: asyncio.Task[None]) -> None:
    ends = [asyncio.ensure_future(stopping.wait()), asyncio.ensure_future(session.wait_dead())]
    await asyncio.wait([*ends, serving], return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    await asyncio.gather(*ends, return_exceptions=True)
