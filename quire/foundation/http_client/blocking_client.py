"""Requests to one server from code without an event loop. Its own loop runs only while it waits for something."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping

import msgspec

from quire.foundation.http_client.connection import Connection
from quire.foundation.http_client.http1 import HttpAddress, encoded_headers
from quire.foundation.http_client.pool import ConnectionPool, unchecked_tls


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
        """Status and body of an answer. A body for the request is sent as JSON, if it is not None. Raises HttpError if
        there is no answer."""
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
