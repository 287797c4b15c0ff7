"""A load balancer in a few lines: new connections go to a server that says it is ready. It never tries again.

One connection is one request: its clients keep none alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from urllib.parse import urlsplit

POLL_S = 0.1
ASK_TIMEOUT_S = 2.0


class ReadyProxy:
    """Follows `/ready` of its servers. A context inside an event loop.

    Attributes:
        url: Where it listens.
        ready: The servers that said so when they were last asked, by name.
        served: How many connections each has got.
    """

    def __init__(self) -> None:
        self._addresses: dict[str, tuple[str, int]] = {}
        self.ready: set[str] = set()
        self.served: dict[str, int] = {}
        self._turns = itertools.count()
        self._open: set[asyncio.Task[None]] = set()
        self.url = ""

    def add(self, name: str, url: str) -> None:
        """A server has an address, perhaps another one than before."""
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self._addresses[name] = parts.hostname, parts.port
        self.served.setdefault(name, 0)

    async def wait_ready(self, name: str) -> None:
        """Until a server is ready."""
        while name not in self.ready:
            await asyncio.sleep(POLL_S)

    async def __aenter__(self) -> ReadyProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self._polling = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._polling.cancel()
        self._server.close()
        if self._open:
            await asyncio.wait(self._open, timeout=10)

    async def _poll(self) -> None:
        while True:
            for name, address in list(self._addresses.items()):
                if await _is_ready(*address):
                    self.ready.add(name)
                else:
                    self.ready.discard(name)
            await asyncio.sleep(POLL_S)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(task := asyncio.create_task(self._on_connection(reader, writer)))
        task.add_done_callback(self._open.discard)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = sorted(self.ready)
        try:
            if not ready:
                writer.write(b"HTTP/1.1 502 No server is ready\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                return
            name = ready[next(self._turns) % len(ready)]
            self.served[name] += 1
            back_reader, back_writer = await asyncio.open_connection(*self._addresses[name])
            await asyncio.gather(_pump(reader, back_writer), _pump(back_reader, writer))
        except OSError:
            pass  # the client sees its connection end
        finally:
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy what comes until its end, which is passed on."""
    try:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


async def _is_ready(host: str, port: int) -> bool:
    """Whether a server answers /ready with 200."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(ASK_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"GET /ready HTTP/1.1\r\nhost: ready\r\nconnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    return False
