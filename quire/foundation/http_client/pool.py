"""Connections to one server, kept open between requests: how many there are, and how old they may be; and a client for
code without an event loop.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Generator, Mapping

import msgspec

from quire.errors import reason
from quire.foundation.http_client.connection import Connection, OnBody
from quire.foundation.http_client.http1 import ConnectError, HttpAddress, HttpError, HttpTimeout, encoded_headers

CONNECT_S = 5.0
IDLE_S = 15.0
"""Seconds after which an idle connection is not used again, because the server may be about to close it."""
MAX_IDLE = 256


def unchecked_tls() -> ssl.SSLContext:
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return tls


class ConnectionPool:
    """Connections to one server. A connection has to open within `connect_s` seconds, and at most `max_idle` of them
    are kept for later requests."""

    def __init__(
        self,
        address: HttpAddress,
        tls: ssl.SSLContext | None = None,
        connect_s: float = CONNECT_S,
        max_idle: int = MAX_IDLE,
    ) -> None:
        self.address = address
        self._tls = (tls or ssl.create_default_context()) if address.tls else None
        self._connect_s = connect_s
        self._max_idle = max_idle
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def ask(self, data: bytes, timeout_s: float | None, on_body: OnBody | None = None) -> Connection:
        """Send a request, on an idle connection if there is one; see `Connection.request`. Returns the connection once
        the answer's head has come; it has to be put back or aborted. Raises HttpError if there is no answer."""
        connection = self._take_idle()
        if connection is not None:
            try:
                return await _answered(connection, data, timeout_s, on_body)
            except HttpError as error:
                if not connection.was_closed_unused or isinstance(error, HttpTimeout):
                    raise
                # The server closed it while it was idle, as it may at any time.
        return await _answered(await self.connect(), data, timeout_s, on_body)

    async def connect(self) -> Connection:
        """A new connection. Raises ConnectError if the server cannot be reached."""
        loop, address = asyncio.get_running_loop(), self.address
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self._forget), address.host, address.port, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectError(f"It took no connection within {self._connect_s:g} s.") from None
        except OSError as error:  # ssl.SSLError is one
            raise ConnectError(f"It cannot be reached: {reason(error)}.") from error
        self._open.add(connection)
        return connection

    def put_back(self, connection: Connection) -> None:
        """Keep a connection whose answer was read, or close one whose rest of the answer nobody wants."""
        if connection.reusable and len(self._idle) < self._max_idle:
            connection.finish()
            self._idle.append(connection)
        else:
            connection.abort()

    def close_old(self) -> None:
        """Close connections that have been idle for long. Call this now and then."""
        now = asyncio.get_running_loop().time()
        while self._idle and now - self._idle[0].idle_since >= IDLE_S:
            self._idle.pop(0).abort()

    def fail_waiting(self, message: str) -> None:
        """Give up requests whose answers have not begun, because the server does not work."""
        for connection in list(self._open):
            if connection.waiting:
                connection.fail(HttpError(message))

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()

    def _take_idle(self) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and now - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        return None

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


async def _answered(connection: Connection, data: bytes, timeout_s: float | None, on_body: OnBody | None) -> Connection:
    try:
        connection.request(data, timeout_s, on_body)
        await connection.head()
    except BaseException:  # the caller's cancellation, too
        connection.abort()
        raise
    return connection


class BlockingClient:
    """One server, asked one thing at a time. A context. An answer's head has to be complete after `timeout_s` seconds,
    and no silence may be longer; None for no limit. Raises ValueError if the URL or a header cannot be used."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        connect_s: float,
        insecure: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self._headers = encoded_headers({"Accept": "*/*", "Content-Type": "application/json", **headers})
        self._pool = ConnectionPool(HttpAddress.of(url), unchecked_tls() if insecure else None, connect_s)
        self._timeout_s = timeout_s
        self._runner = asyncio.Runner()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._close())
        self._runner.close()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Status and body of the answer to a request, whose body is sent as JSON. Raises HttpError if there is none."""
        status, parts = self.stream(method, path, body)
        return status, b"".join(parts)

    def stream(self, method: str, path: str, body: object = None) -> tuple[int, Generator[bytes, None, None]]:
        """Status of an answer, and its body in parts, as they come. Closing the generator tells the server to stop.
        Raises HttpError if there is no answer."""
        content = b"" if body is None else msgspec.json.encode(body)
        data = self._pool.address.request(method.encode(), path.encode(), self._headers, content)
        status, connection = self._runner.run(self._begin(data))
        return status, self._parts(connection)

    def _parts(self, connection: Connection) -> Generator[bytes, None, None]:
        try:
            while part := self._runner.run(connection.read()):
                yield part
        finally:
            self._runner.run(self._end(connection))

    async def _begin(self, data: bytes) -> tuple[int, Connection]:
        connection = await self._pool.ask(data, self._timeout_s)
        return (await connection.head()).status, connection

    async def _end(self, connection: Connection) -> None:
        self._pool.put_back(connection)
        await asyncio.sleep(0)  # the loop closes a connection in its next turn

    async def _close(self) -> None:
        self._pool.close()
        await asyncio.sleep(0)
