"""The process of `quire route`: listens, follows its list, handles signals, and drains at SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from pathlib import Path

import uvicorn
import uvloop

from quire.errors import ConfigError
from quire.foundation.clock import Clock, SystemClock
from quire.foundation.config import ServerConfig
from quire.foundation.config.router import RouterConfig
from quire.foundation.processes import garbage
from quire.serving.api.auth import RequestIdMiddleware
from quire.serving.api.http_server import HttpServer, uvicorn_config
from quire.serving.api.tls import load_tls
from quire.serving.router.app import RouterApp, RouterHttpProtocol
from quire.serving.router.backend_list import BackendList, read_backend_list
from quire.serving.router.fleet import Fleet
from quire.serving.router.prober import Prober
from quire.serving.router.router_metrics import RouterMetrics
from quire.serving.supervisor.announce import access, print_log, url
from quire.serving.supervisor.listener import listen

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Seconds between two looks at the list's file."""
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def route(config: RouterConfig) -> int:
    """Route until a signal ends it; returns the exit code. Raises SetupError if the router cannot start."""
    backends = read_backend_list(config)
    server = ServerConfig(
        host=config.host, port=config.port, ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs, ssl_cert_reqs=config.ssl_cert_reqs, uvicorn_log_level="warning",
    )  # fmt: skip
    with listen(server) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Router(config, backends, SystemClock()).serve(server, listener))


class Router:
    """One router, with the list as it was read at the start."""

    def __init__(self, config: RouterConfig, backends: BackendList, clock: Clock) -> None:
        self._config = config
        self._metrics = RouterMetrics()
        self._fleet = Fleet(config, clock)
        self._app = RouterApp(self._fleet, config, self._metrics, clock)
        self._prober = Prober(self._fleet, config)
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._file_state = _state_of(config.dynamic_config_yaml)
        self._list = backends

    async def serve(self, server: ServerConfig, listener: socket.socket) -> int:
        """Serve until a signal; returns the exit code."""
        http = HttpServer(self._http_config(server))
        load_tls(http.config)
        loop = asyncio.get_running_loop()
        for number in _STOPPING:
            loop.add_signal_handler(number, self.stop, number)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        self._apply(self._list)
        watching = loop.create_task(self._watch())
        serving = loop.create_task(http.serve(sockets=[listener]))
        try:
            self._announce(server, listener)
            await _first(serving, self._signalled)
            await self._drain()
        finally:
            watching.cancel()
            self._prober.close()
            http.should_exit = True
            await serving
        return 128 + self._signals[-1] if len(self._signals) > 1 else 0

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Act on a signal: the first ends the router when open requests have ended, the second at once."""
        self._signals.append(number)
        self._signalled.set()

    def reload(self) -> None:
        """Read the list again. A list with errors changes nothing."""
        self._file_state = _state_of(self._config.dynamic_config_yaml)
        try:
            found = read_backend_list(self._config)
        except ConfigError as error:
            self._metrics.reloads["failed"] += 1
            logger.error("The list stays as it was: %s", error.message)
            return
        self._metrics.reloads["ok"] += 1
        logger.info("The list was read: %d servers, %d keys.", len(found.backends), len(found.keys))
        self._apply(found)

    def _apply(self, found: BackendList) -> None:
        if self._list.keys and not found.keys:
            logger.warning("There are no keys any more: everybody may send requests.")
        self._list = found
        self._fleet.update(found.backends)
        self._prober.follow()
        self._app.keys = found.keys
        self._app.limiter.keep(found.keys)
        self._metrics.forget({backend.url for backend in found.backends})

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            garbage.collect_in_calm(self._app.num_open)
            if _state_of(self._config.dynamic_config_yaml) != self._file_state:
                self.reload()

    async def _drain(self) -> None:
        """Wait until open requests have ended, their time is over, or a second signal comes."""
        self._app.drain()
        deadline = asyncio.get_running_loop().time() + self._config.shutdown_timeout
        while self._app.num_open and len(self._signals) < 2 and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        if self._app.num_open:
            logger.warning("%d requests that were still open were ended.", self._app.num_open)
            for backend in self._fleet.backends:
                backend.pool.close()

    def _http_config(self, server: ServerConfig) -> uvicorn.Config:
        config = uvicorn_config(RequestIdMiddleware(self._app, always_answer=False), server)
        config.http = RouterHttpProtocol
        config.lifespan = "off"
        config.proxy_headers = False  # servers get X-Forwarded-For with the address that the connection has
        config.server_header = config.date_header = False  # the servers' own go on
        return config

    def _announce(self, server: ServerConfig, listener: socket.socket) -> None:
        for backend in self._list.backends:
            print_log(f"  server      {backend.url}{' (draining)' if backend.drain else ''}")
        print_log(f"  access      {access(len(self._list.keys))}")
        print_log(f"  chat in a browser   {url(server, listener)}/")
        print_log(f"Routing: OpenAI clients    {url(server, listener)}/v1")


async def _first(serving: asyncio.Task[None], signalled: asyncio.Event) -> None:
    waiting = asyncio.ensure_future(signalled.wait())
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _state_of(path: str | None) -> tuple[int, int, int]:
    """Numbers that change when the file does. When a mounted ConfigMap changes, its inode does."""
    try:
        status = Path(path).stat() if path else None
    except OSError:
        status = None
    return (status.st_mtime_ns, status.st_size, status.st_ino) if status else (0, 0, 0)
