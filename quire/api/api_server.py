"""The API process: `python -m quire.api.api_server`, started by the supervisor beside the engine.

Owns what it is made of: session, application, uvicorn on an inherited socket, event loop. Never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from quire.api.app import create_app
from quire.api.engine_session import EngineSession
from quire.api.http_protocol import BoundedHttpProtocol
from quire.api.measured_loop import MeasuredLoop
from quire.api.process_life import serve_until_end
from quire.config import ServerConfig
from quire.engine.transport import ZmqClient
from quire.errors import ConfigError
from quire.processes import garbage
from quire.processes.child_main import run_child
from quire.processes.launch import LaunchConfig, SendReport
from quire.processes.scheduling import do_not_interrupt_others
from quire.text.model_text import load_model_text

logger = logging.getLogger(__name__)

PROBE_PATHS = ("/health", "/ping", "/ready", "/metrics", "/load")
"""Probes, which come every few seconds and are not logged."""
KEEP_ALIVE_S = 75


def main(launch: LaunchConfig, report: SendReport, make_app: Callable[..., FastAPI] = create_app) -> None:
    """Serve until SIGTERM, then until open requests have ended or their time is over."""
    server = launch.config.server
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("uvicorn.access").addFilter(_is_no_probe)
    if launch.config.device.device == "cpu":
        do_not_interrupt_others()  # the engine computes on the same processors
    text = load_model_text(launch.config)
    session = EngineSession(
        ZmqClient(Path(launch.directory), launch.number, launch.engine),
        launch.config,
        text.eos_ids,
        special_tokens=text.special_tokens,
        report=report,
    )
    session.stats.api_restarts = launch.number
    app = make_app(launch.config, session, text, developer_mode=launch.developer_mode)
    http = _HttpServer(uvicorn_config(app, server))
    load_tls(http.config)
    if server.uvicorn_log_level == "info":  # uvicorn's own start and stop lines: the supervisor prints these
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    listener = socket.socket(fileno=launch.listen_fd)
    with listener, asyncio.Runner(loop_factory=lambda: MeasuredLoop(session.stats.callbacks)) as runner:
        runner.run(
            serve_until_end(
                http,
                session,
                listener,
                server.shutdown_timeout,
                garbage.collecting(report, lambda: session.num_sequences),
                replaces=launch.number > 0,
            )
        )


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: SIGTERM has to drain first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        garbage.begin_serving()


def load_tls(config: uvicorn.Config) -> None:
    """Read keys and certificates, so that what is wrong with them is said in a line.

    Raises:
        ConfigError: They cannot be used.
    """
    if (config.ssl_keyfile or config.ssl_ca_certs or config.ssl_cert_reqs) and not config.ssl_certfile:
        raise ConfigError(
            "--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile.", param="ssl_certfile"
        )
    if config.ssl_cert_reqs and not config.ssl_ca_certs:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: no certificate would be good.", param="ssl_ca_certs")
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"The files of --ssl-keyfile, --ssl-certfile and --ssl-ca-certs cannot be used: {error}."
        ) from error


def uvicorn_config(app: object, server: ServerConfig) -> uvicorn.Config:
    """How requests are read and answered."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=BoundedHttpProtocol,
        log_config=None,
        log_level=server.uvicorn_log_level,
        access_log=not server.disable_uvicorn_access_log,
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_cert_reqs=server.ssl_cert_reqs,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        lifespan="on",
    )


def _is_no_probe(record: logging.LogRecord) -> bool:
    arguments = record.args
    return not (isinstance(arguments, tuple) and len(arguments) > 2 and str(arguments[2]).split("?")[0] in PROBE_PATHS)


if __name__ == "__main__":
    run_child(main)
