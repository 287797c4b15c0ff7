"""Where a server is, the bytes of a request to it, and a parser for its answer, built on httptools. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

Headers = list[tuple[bytes, bytes]]
"""Names and values, in their order."""
_BREAKS_LINE = re.compile(rb"[\r\n\0]")
MAX_HEAD_BYTES = 64 * 2**10
MAX_FRAMING = 16
"""Bytes of chunk framing and trailers that are allowed for each byte of the body, beyond MAX_HEAD_BYTES."""
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BAD_NAME = re.compile(rb"[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\\"]")


@dataclass(frozen=True)
class HttpAddress:
    """A server's root. `host` is a name or an address, IPv6 without brackets; `authority` is for the Host header;
    `path` is the prefix of all its paths, and usually empty."""

    host: str
    port: int
    tls: bool
    authority: bytes
    path: bytes

    @classmethod
    def of(cls, url: str) -> HttpAddress:
        """The address in a URL such as `https://host:8000/prefix`. Raises ValueError if the URL is no HTTP address."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or " " in url:
            raise ValueError(f"'{url}' is no HTTP address")
        tls = parts.scheme == "https"
        authority = parts.netloc.rpartition("@")[2].encode()
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, authority, parts.path.rstrip("/").encode())

    def request(self, method: bytes, path: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes = b"") -> bytes:
        lines = [b"%s %s%s HTTP/1.1" % (method, self.path, path), b"host: " + self.authority]
        lines += [name + b": " + value for name, value in headers]
        if body or method != b"GET":
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join([*lines, b"", body])


def encoded_headers(headers: Mapping[str, str]) -> Headers:
    """Headers as they are sent. Raises ValueError if a header has a character that would end its line."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    for name, value in encoded:
        if _BREAKS_LINE.search(name + value):
            raise ValueError(f"the header {name.decode()!r} has a line break")
    return encoded


class HttpError(Exception):
    """A server did not answer as it should."""


class ConnectError(HttpError):
    """A server cannot be reached."""


class HttpTimeout(HttpError):
    """A server sent nothing for too long."""


@dataclass
class AnswerHead:
    """Status and headers, as they came; names may have capital letters."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


class AnswerParser:
    """Parses one answer; bytes that are no answer raise HttpError. `head` is None until it is complete, `held` counts
    bytes of the body that nobody has taken yet, `complete` tells that the whole answer has come, and `keep_alive` that
    another request may follow."""

    def __init__(self) -> None:
        self.head: AnswerHead | None = None
        self.held = 0
        self.complete = False
        self.keep_alive = False
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self._framing = 0  # bytes beside the body
        self._until_close = True  # unless the head says how long the body is

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. Raises HttpError if the bytes cannot be part of an answer."""
        if self.complete:
            raise HttpError("It sent more than its answer.")
        body = self._body_bytes
        self._parse(data)
        self._framing += len(data) - (self._body_bytes - body)
        if self._framing > MAX_HEAD_BYTES + MAX_FRAMING * self._body_bytes:
            raise HttpError("Its headers are too large.")

    def end(self) -> None:
        """Take in that the server has closed the connection. Raises HttpError if the answer is not complete."""
        if self.complete:
            return
        if self.head is None or not self._until_close:
            when = "in the middle of its answer" if self.head else "before it answered"
            raise HttpError(f"It closed the connection {when}.")
        self.complete = True

    def take(self) -> bytes:
        """The part of the body that came since the last call."""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self.held = 0
        return data

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                raise HttpError(f"Its answer is no valid HTTP: {error}.") from error
            self.keep_alive = False  # the answer is complete, and what follows belongs to no request

    # What httptools calls.

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is not None:
            return  # a trailer
        if _BAD_NAME.search(name) or _BAD_VALUE.search(value):
            raise ValueError("a header has characters that none may have")
        self._headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # another head follows
            self._headers = []
            self._until_close = True
            return
        self.head = AnswerHead(status, self._headers)
        self._until_close = self._until_close and status not in (204, 304)
        self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self.held += len(body)
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = self.head is not None
