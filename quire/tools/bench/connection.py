"""HTTP/1.1 to one server, with as little work as possible for each piece that arrives.

Owns connections and their reuse. What the load generator does takes time from the server that it measures, and delays
the clock that it reads; a general client costs 200 µs and more for each token of a stream. Knows nothing about
events, redirects or proxies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

OK = 200

OnBody = Callable[[bytes], None]
"""Called with each piece of an answer's body as it arrives, in the event loop."""


@dataclass(frozen=True)
class Address:
    """Where the server is.

    Attributes:
        path: Goes before every path.
        tls: None for plain HTTP.
        headers: Sent with every request.
    """

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    headers: Mapping[str, str]

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str], *, verify: bool = True) -> Address:
        """Make the address of a server's root, such as `https://host:8000/prefix`; `verify`: check its certificate.

        Raises:
            ValueError: `url` is no HTTP address.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"'{url}' is no HTTP address")
        tls = None
        if parts.scheme == "https":
            tls = ssl.create_default_context()
            if not verify:
                tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        port = parts.port or (80 if tls is None else 443)
        return cls(parts.hostname, port, parts.path.rstrip("/"), tls, dict(headers))

    def post(self, path: str, body: bytes) -> bytes:
        """The bytes of a POST request with a JSON body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = {
            "Host": f"{host}:{self.port}",
            "Content-Type": "application/json",
            "Accept": "*/*",
            **self.headers,
            "Content-Length": str(len(body)),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self.path}{path} HTTP/1.1\r\n{head}\r\n".encode() + body


class Connections:
    """Open connections to one server; one that has had its whole answer takes the next request. A context."""

    def __init__(self, address: Address, connect_s: float) -> None:
        """
        Args:
            connect_s: How long opening one may take.
        """
        self._address = address
        self._connect_s = connect_s
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()

    async def post(self, path: str, body: bytes, on_body: OnBody) -> int:
        """Send a request and wait for the end of its answer; returns its status.

        Raises:
            OSError: There is no connection, or it broke (also `ssl.SSLError`, `TimeoutError`).
            httptools.HttpParserError: The answer is no HTTP.
        """
        connection = self._take() or await self._open()
        try:
            status = await connection.ask(self._address.post(path, body), on_body)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _open(self) -> _Connection:
        address, loop = self._address, asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_s):
            _, connection = await loop.create_connection(_Connection, address.host, address.port, ssl=address.tls)
        return connection


class _Connection(asyncio.Protocol):
    """One connection with one request at a time.

    Attributes:
        reusable: Whether it can take a request.
    """

    def __init__(self) -> None:
        self.reusable = False
        self._ended: asyncio.Future[int] | None = None
        self._framed = self._headers_read = False

    async def ask(self, request: bytes, on_body: OnBody) -> int:
        self.reusable = self._framed = self._headers_read = False
        self._ended = asyncio.get_running_loop().create_future()
        self.on_body = on_body  # called by the parser, which looks for it when it is made
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        return await self._ended

    def close(self) -> None:
        self.reusable = False
        self._transport.close()

    # --- of the transport -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():  # nobody asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # what `on_body` said of the data
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._ended is None or self._ended.done():
            return
        if error is None and self._ends_by_closing():
            self._ended.set_result(self._parser.get_status_code())
        else:
            self._fail(error or ConnectionResetError("the server closed the connection"))

    # --- of the parser ----------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._headers_read = True

    def on_message_complete(self) -> None:
        if self._ended is not None and not self._ended.done():
            self.reusable = self._parser.should_keep_alive()
            self._ended.set_result(self._parser.get_status_code())

    def _ends_by_closing(self) -> bool:
        """An answer that announces no length ends where the connection does."""
        return self._headers_read and not self._framed

    def _fail(self, error: BaseException) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
        self.close()
