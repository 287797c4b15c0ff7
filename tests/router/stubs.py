"""Servers that answer as a test wants, good and hostile, and a router in front of them, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx

from quire.foundation.clock import Clock, SystemClock
from quire.foundation.config import ServerConfig
from quire.foundation.config.router import RouterConfig
from quire.serving.router.backend_list import read_backend_list
from quire.serving.router.router_process import Router
from quire.serving.supervisor.listener import listen

WAIT_S = 60.0
"""Longer than anything takes that works."""


@dataclass(frozen=True)
class Seen:
    """A request as a stub got it; names of headers in small letters."""

    path: str
    headers: dict[str, str]
    body: bytes


Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Seen], Awaitable[None]]


class StubBackend:
    """A server. A context inside an event loop.

    Attributes:
        models: What /v1/models lists.
        models_page: What it shows in place of that, if anything.
        probes: Questions that it got.
        ready: The status of /ready.
        metrics: What /metrics says.
        behaviour: Answers POSTs.
        seen: POSTs that it got.
        aborted: Set when a client closes a connection on which an answer is due.
    """

    def __init__(
        self,
        name: str = "stub",
        models: tuple[str, ...] = ("m",),
        behaviour: Behaviour | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name
        self.models = models
        self.models_page = b""
        self.probes = 0
        self.ready = 200
        self.metrics = ""
        self.behaviour = behaviour or json_answer(name)
        self.seen: list[Seen] = []
        self.aborted = asyncio.Event()
        self.url = ""
        self._tls = tls
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> StubBackend:
        await self.start()
        return self

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, ssl=self._tls)
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def kill(self) -> None:
        """Nobody listens any more, and what was open is cut."""
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(task := asyncio.ensure_future(self._serve(reader, writer)))
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (seen := await _read_request(reader)) is not None:
                if seen.path in ("/ready", "/v1/models", "/metrics"):
                    await self._answer_probe(writer, seen.path)
                    continue
                self.seen.append(seen)
                answering = asyncio.ensure_future(self.behaviour(reader, writer, seen))
                leaving = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                    if not answering.done():
                        self.aborted.set()
                        return
                    answering.result()
                finally:
                    answering.cancel()
                    leaving.cancel()
                    await asyncio.wait({answering, leaving})  # a `kill` meanwhile is not taken for their ends
        except (OSError, asyncio.IncompleteReadError):
            self.aborted.set()
        finally:
            writer.transport.abort()

    async def _answer_probe(self, writer: asyncio.StreamWriter, path: str) -> None:
        self.probes += 1
        if path == "/v1/models":
            cards = [{"id": name, "object": "model", "owned_by": self.name} for name in self.models]
            body, status = self.models_page or json.dumps({"data": cards}).encode(), 200
        else:
            body, status = (self.metrics.encode(), 200) if path == "/metrics" else (b"{}", self.ready)
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()


async def _read_request(reader: asyncio.StreamReader) -> Seen | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Seen(first.split(" ")[1], headers, await reader.readexactly(int(headers.get("content-length", 0))))


def json_answer(name: str, status: int = 200) -> Behaviour:
    """The name as JSON, with a length."""

    async def behave(_: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Seen) -> None:
        body = json.dumps({"from": name}).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nX-From: %s\r\n" % (status, name.encode()))
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    return behave


def raw(*parts: bytes, wait: asyncio.Event | None = None, close: bool = True) -> Behaviour:
    """These bytes, and then the end of the connection; or a silence, if `wait` is never set."""

    async def behave(_: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Seen) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if wait is not None:
            await wait.wait()
        if close:
            writer.close()

    return behave


def chunked(*parts: bytes, content_type: bytes = b"text/event-stream") -> tuple[bytes, ...]:
    """An answer in chunks, for `raw`."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n" % content_type
    return (head, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts))


@dataclass
class RouterUnderTest:
    """A router that runs, and a client of it."""

    router: Router
    client: httpx.AsyncClient
    url: str

    async def ask(self, text: str = "hi", model: str | None = "m", **options: Any) -> httpx.Response:
        """A completion."""
        body = {"prompt": text} | ({"model": model} if model else {})
        return await self.client.post("/v1/completions", json=body, **options)

    async def states(self, **options: Any) -> dict[str, dict[str, Any]]:
        """Of all servers, by address."""
        found = (await self.client.get("/backends", **options)).json()["backends"]
        return {each["url"]: each for each in found}

    async def metric(self, sample: str) -> float:
        """The value of a sample, written as in /metrics; 0 if it is not there."""
        text = (await self.client.get("/metrics")).text
        values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"{sample} ")]
        return float(values[0]) if values else 0.0


@contextlib.asynccontextmanager
async def running_router(
    *backends: StubBackend, ready: bool = True, clock: Clock | None = None, **settings: Any
) -> AsyncIterator[RouterUnderTest]:
    """A router in front of these; once they are ready, unless told otherwise."""
    usual: dict[str, Any] = {"health_check_interval": 0.05, "engine_stats_interval": 0.05, "shutdown_timeout": 5.0}
    urls = tuple(backend.url for backend in backends)
    config = RouterConfig(**{"static_backends": urls} | usual | settings)
    with listen(ServerConfig(host="127.0.0.1", port=0)) as listener:
        router = Router(config, read_backend_list(config), clock or SystemClock())
        tls = {name: getattr(config, name) for name in ("ssl_keyfile", "ssl_certfile")}
        serving = asyncio.create_task(router.serve(ServerConfig(host="127.0.0.1", port=0, **tls), listener))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            under_test = RouterUnderTest(router, client, url)
            try:
                if ready:
                    key = config.api_key[0] if config.api_key else ""
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    await until(lambda: _all_ready(under_test, headers))
                yield under_test
            finally:
                router.stop()
                router.stop()
                await serving


class _SteadyLoop(asyncio.SelectorEventLoop):
    """An event loop on whose clock little time passes while its process stands still: a turn takes 20 ms at most."""

    def __init__(self) -> None:
        self._passed, self._seen = 0.0, time.monotonic()
        super().__init__(_ShortSelector())

    def time(self) -> float:
        seen, self._seen = self._seen, time.monotonic()
        self._passed += min(self._seen - seen, 0.02)
        return self._passed


class _ShortSelector(selectors.DefaultSelector):
    """Waits so shortly that the loop looks at its clock often enough."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout and min(timeout, 0.01))


def run_steadily(check: Coroutine[Any, Any, None]) -> None:
    """Run a test of short time limits: what is in time on a machine that works is in time on one that does not."""
    with asyncio.Runner(loop_factory=_SteadyLoop) as runner:
        runner.run(check)


async def _all_ready(router: RouterUnderTest, headers: dict[str, str]) -> bool:
    states = await router.states(headers=headers)
    return bool(states) and all(state["ready"] for state in states.values())


async def read_all(router: RouterUnderTest, parts: list[bytes]) -> None:
    """A completion as it comes."""
    async with router.client.stream("POST", "/v1/completions", json={"model": "m"}) as answer:
        async for part in answer.aiter_raw():
            parts.append(part)


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(WAIT_S):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.01)
