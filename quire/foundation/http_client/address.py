"""Where a server is, and the bytes of a request to it. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

Headers = list[tuple[bytes, bytes]]
"""Names and values, in their order."""
_BREAKS_LINE = re.compile(rb"[\r\n\0]")


@dataclass(frozen=True)
class HttpAddress:
    """A server's root.

    Attributes:
        host: A name or an address; IPv6 without brackets.
        authority: For the Host header.
        path: Prefix of all the server's paths; usually empty.
    """

    host: str
    port: int
    tls: bool
    authority: bytes
    path: bytes

    @classmethod
    def of(cls, url: str) -> HttpAddress:
        """The address in a URL such as `https://host:8000/prefix`.

        Raises:
            ValueError: The URL is no HTTP address.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or " " in url:
            raise ValueError(f"'{url}' is no HTTP address")
        tls = parts.scheme == "https"
        authority = parts.netloc.rpartition("@")[2].encode()
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, authority, parts.path.rstrip("/").encode())

    def request(self, method: bytes, path: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes = b"") -> bytes:
        """Head and body of a request."""
        lines = [b"%s %s%s HTTP/1.1" % (method, self.path, path), b"host: " + self.authority]
        lines += [name + b": " + value for name, value in headers]
        if body or method != b"GET":
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join([*lines, b"", body])


def encoded_headers(headers: Mapping[str, str]) -> Headers:
    """Headers as they are sent.

    Raises:
        ValueError: A header has a character that would end its line.
    """
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    for name, value in encoded:
        if _BREAKS_LINE.search(name + value):
            raise ValueError(f"the header {name.decode()!r} has a line break")
    return encoded
