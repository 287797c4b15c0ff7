"""uvicorn as Quire uses it: request heads of bounded size that arrive in time, no signal handlers of its own.

uvicorn reads heads of any size for as long as the client likes. What is refused before there is a request is answered
here, as an OpenAI error body. Owns also how clients of HTTP/1.0 are answered. Knows no application.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from quire.errors import RequestError
from quire.foundation.config import ServerConfig
from quire.foundation.processes import garbage
from quire.serving.api.event_loop import MeasuredLoop

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

KEEP_ALIVE_S = 75
MAX_HEAD_BYTES = 64 * 2**10
"""Maximum size of request line and headers together."""
HEAD_TIMEOUT_S = 60.0
"""Seconds from the first byte of a request, or from the connection, to the end of its headers; nginx's default."""
LINGER_S, LINGER_BYTES = 2.0, 2**20
"""Seconds and bytes for which a client that was refused is read. A connection that is closed with bytes unread is
reset, and a reset can take the answer away from a client that has not read it."""
MAX_FRAMING = 16
"""Bytes of chunks and trailers for each byte of a body, beyond what a head may have."""
_HEADER_FRAMING = 4
"""Bytes of a header beside its name and its value."""
_UNCHUNKED = ("0.9", "1.0")
_TOO_LARGE = f"Request line and headers together must be at most {MAX_HEAD_BYTES} bytes."
_TOO_SLOW = "The request's headers did not arrive in time."


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: SIGTERM has to drain first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        garbage.begin_serving()


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


class UnchunkedCycle(RequestResponseCycle):
    """A request of HTTP/1.0, which knows no chunks: an answer of unknown length ends with the connection (RFC 9112,
    sections 6.1 and 6.3). The connection is closed behind each answer, so nothing is kept alive by mistake."""

    _is_sized = False

    async def send(self, message: ASGISendEvent) -> None:
        """Send a part of the answer without chunks."""
        if message["type"] == "http.response.start":
            self._is_sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._is_sized:
                self.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self._is_sized:
            self.expected_content_length = len(message.get("body", b""))  # as much as there is, each time
        await super().send(message)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    head_timeout_s = HEAD_TIMEOUT_S
    _num_begun = 0  # heads
    _head_bytes = 0
    _framing_bytes = 0  # beside the body: sizes of chunks, and what comes behind the last
    _body_bytes = 0
    _begun = False  # whether any byte of the request has come
    _timer: asyncio.TimerHandle | None = None  # while the head is not complete, or the client was refused
    _linger_bytes: int | None = None  # still read from a client that was refused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if isinstance(self.loop, MeasuredLoop):  # uvloop calls this by itself
            self.loop.callback_times.run(self._data_received, data)
        else:
            self._data_received(data)

    def _data_received(self, data: bytes) -> None:
        if self._linger_bytes is not None:
            self._linger_bytes -= len(data)
            if self._linger_bytes < 0:
                self.transport.close()
            return
        begun, timer, body = self._num_begun, self._timer, self._body_bytes
        super().data_received(data)
        if self._num_begun != begun or self._timer is not timer or self._is_refused:
            return  # a head began or ended somewhere in this part
        if timer is not None:
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data) - (self._body_bytes - body)
        if self._head_bytes > MAX_HEAD_BYTES or self._framing_bytes > MAX_HEAD_BYTES + MAX_FRAMING * self._body_bytes:
            self._refuse(431, _TOO_LARGE)

    @property
    def _is_refused(self) -> bool:
        """Whether all that still comes is dropped."""
        return self._linger_bytes is not None or self.transport.is_closing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._is_refused:
            return
        self._begun = True
        if self._timer is None:  # a later request on the same connection
            self._begin_head()

    def on_headers_complete(self) -> None:
        if self._is_refused:  # a request behind one that was
            return
        self._end_head()
        size = len(self.url) + sum(len(name) + len(value) + _HEADER_FRAMING for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)
            return
        super().on_headers_complete()
        if self.scope["http_version"] in _UNCHUNKED and self.cycle is not None and self.cycle.scope is self.scope:
            self.cycle.__class__ = UnchunkedCycle  # its task begins in a later turn of the event loop
            self.cycle.waiting_for_100_continue = False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._is_refused:  # else there is no request that the body could belong to
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
            self._refuse(400, "This is no valid HTTP request.")

    def _begin_head(self) -> None:
        self._num_begun += 1
        self._head_bytes = self._framing_bytes = self._body_bytes = 0
        self._timer = self.loop.call_later(self.head_timeout_s, self._on_timeout)

    def _end_head(self) -> None:
        self._begun = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if self.transport.is_closing():
            return
        if self._begun:
            self._refuse(408, _TOO_SLOW)
        else:
            self.transport.close()  # nothing was ever sent

    def _refuse(self, status: int, message: str) -> None:
        error: dict[str, Any] = {"message": message, "type": RequestError.type, "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self._end_head()
        if (self.cycle is None or self.cycle.response_complete) and self.transport.can_write_eof():
            self.transport.write_eof()
            self._linger_bytes = LINGER_BYTES
            self._timer = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()  # an earlier answer is under way, or this is TLS, which has no end of one direction
