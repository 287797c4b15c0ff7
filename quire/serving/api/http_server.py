"""uvicorn as Quire uses it: bounded request heads, TLS, no signal handlers of its own. Knows no application."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from quire.errors import ConfigError
from quire.foundation.config import ServerConfig
from quire.foundation.processes import garbage
from quire.serving.api.http_protocol import BoundedHttpProtocol

KEEP_ALIVE_S = 75


class HttpServer(uvicorn.Server):
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
        access_log=False,  # see request_record.py
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_cert_reqs=server.ssl_cert_reqs,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        lifespan="on",
    )
