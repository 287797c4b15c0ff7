"""One listening socket, two event loops: each takes its share, and none waits for one that does not come."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.engine.metrics.histogram import WorkTimes
from quire.foundation.processes.shared_memory import SharedNumbers
from quire.serving.api import event_loop
from quire.serving.api.event_loop import AHEAD, SharingLoop
from tests.api.test_tls import openssl


class Echo(asyncio.Protocol):
    """Says hello, and keeps the connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(b"hello")


class Process:
    """What listens, in a thread."""

    def __init__(self, listener: socket.socket, path: Path, place: int, tls: ssl.SSLContext | None = None) -> None:
        self.numbers = SharedNumbers(path, place, 2)
        self._listener = listener
        self._tls = tls
        self._up, self._stopping = threading.Event(), asyncio.Event()
        self.held = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(60)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: SharingLoop(WorkTimes(), self.numbers)) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        server = await self.loop.create_server(Echo, sock=self._listener, ssl=self._tls)  # type: ignore[call-overload]
        self._up.set()
        await self._stopping.wait()
        server.close()

    def hold(self) -> None:
        """Its loop turns no more until `held` is set."""
        stands = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (stands.set(), self.held.wait()))
        assert stands.wait(60)

    def close(self) -> None:
        self.held.set()
        self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(60)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as bound:
        yield bound


@contextlib.contextmanager
def two(listener: socket.socket, path: Path, tls: ssl.SSLContext | None = None) -> Iterator[list[Process]]:
    processes = [Process(listener, path / "numbers", place, tls) for place in range(2)]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


def connect(listener: socket.socket, stack: contextlib.ExitStack) -> socket.socket:
    connection = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=60))
    assert connection.recv(5) == b"hello"
    return connection


def test_connections_one_after_the_other_and_all_at_once_are_shared(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "YIELD_S", 0.1)  # a loop that the system lets wait for 10 ms is not busy
    with two(listener, tmp_path) as processes, contextlib.ExitStack() as stack:
        for _ in range(40):
            connect(listener, stack)
        shares = [process.numbers.own for process in processes]
        assert sum(shares) == 40
        assert abs(shares[0] - shares[1]) <= 2 * AHEAD + 4, shares
        waiting = [stack.enter_context(socket.create_connection(listener.getsockname(), timeout=60)) for _ in range(60)]
        assert all(connection.recv(5) == b"hello" for connection in waiting)
        shares = [process.numbers.own for process in processes]
        assert sum(shares) == 100
        assert abs(shares[0] - shares[1]) <= 20, shares
        stack.close()
        deadline = time.monotonic() + 60
        while any(process.numbers.own for process in processes):
            assert time.monotonic() < deadline, "what is closed does not count"
            time.sleep(0.01)


def test_who_is_busy_takes_none_and_delays_nobody(listener: socket.socket, tmp_path: Path) -> None:
    with two(listener, tmp_path) as (first, second), contextlib.ExitStack() as stack:
        second.hold()
        began = time.monotonic()
        for _ in range(20):
            connect(listener, stack)
        assert time.monotonic() - began < 60
        assert (first.numbers.own, second.numbers.own) == (20, 0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_handshake_that_fails_is_no_open_connection(listener: socket.socket, tmp_path: Path) -> None:
    key, chain = tmp_path / "s.key", tmp_path / "s.pem"
    of_curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", *of_curve, "-x509", "-subj", "/CN=server", "-keyout", key, "-out", chain)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(chain, key)
    with two(listener, tmp_path, tls) as processes:
        for _ in range(5):
            with socket.create_connection(listener.getsockname(), timeout=60) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with contextlib.suppress(OSError):
                    connection.recv(1000)
        trusting = ssl.create_default_context(cafile=chain)
        trusting.check_hostname = False
        with socket.create_connection(listener.getsockname(), timeout=60) as plain, trusting.wrap_socket(plain) as safe:
            assert safe.recv(5) == b"hello"
        deadline = time.monotonic() + 60
        while any(process.numbers.own for process in processes):
            assert time.monotonic() < deadline
            time.sleep(0.01)
