"""The API process: `python -m quire.serving.api_server`, started by the supervisor beside the engine.

Owns what it is made of: the served model and what swaps it, uvicorn on an inherited socket, event loop. Never imports
torch.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from quire.engine.metrics.histogram import WorkTimes
from quire.foundation.processes import garbage
from quire.foundation.processes.child_main import do_not_interrupt_others, run_child
from quire.foundation.processes.launch import LaunchConfig, SendReport
from quire.foundation.processes.logs import set_up_logs
from quire.foundation.processes.shared_memory import SharedNumbers
from quire.serving.api.event_loop import MeasuredLoop, SharingLoop
from quire.serving.api.http_server import HttpServer, load_tls, uvicorn_config
from quire.serving.api.model_swaps import ModelSwaps
from quire.serving.api.process_life import serve_until_end
from quire.serving.api.request_traces import open_traces
from quire.serving.api.served_model import MakeApp
from quire.serving.app import create_app

logger = logging.getLogger(__name__)


def main(launch: LaunchConfig, report: SendReport, make_app: MakeApp = create_app) -> None:
    """Serve until SIGTERM, then until open requests have ended or their time is over."""
    server = launch.config.server
    prefix = f"{launch.api_name}: " if server.api_server_count > 1 else ""
    set_up_logs(launch.config.observability.log_format, launch.api_name, logging.INFO, prefix)
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


if __name__ == "__main__":
    run_child(main, "api")
