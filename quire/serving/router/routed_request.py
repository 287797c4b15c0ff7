"""A client's request as it is sent on: what it asks for, and its bytes for one server or another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quire.foundation.http_client.address import Headers, HttpAddress

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Headers of one connection (RFC 9110, section 7.6.1). Headers that Connection names belong to it too."""
_MADE_ANEW = frozenset({b"host", b"content-length", b"expect"})


@dataclass(frozen=True)
class RoutedRequest:
    """A POST with its whole body.

    Attributes:
        path: Of an endpoint, with the query.
        headers: As they are sent, except those that depend on the server.
        model: None if the request names none.
        blocks: The beginning of its prompt, see `prompt_prefix`.
        prompt_tokens: Estimated.
        received: Monotonic seconds.
    """

    path: bytes
    headers: Headers
    body: bytes
    model: str | None
    blocks: Sequence[bytes]
    prompt_tokens: int
    received: float

    def data_for(self, address: HttpAddress, api_key: str | None) -> bytes:
        """Head and body for a server. `api_key` takes the place of the client's key, unless it is None."""
        headers = self.headers
        if api_key is not None:
            headers = [pair for pair in headers if pair[0] not in (b"authorization", b"x-api-key")]
        if api_key:
            headers.append((b"authorization", b"Bearer " + api_key.encode()))
        return address.request(b"POST", self.path, headers, self.body)


def without_hops(headers: Iterable[tuple[bytes, bytes]], *, without: frozenset[bytes] = frozenset()) -> Headers:
    """Headers that go on to the other side, with names in small letters; also without those named in `without`."""
    kept = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in kept if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in kept if not (name in HOP_BY_HOP or name in named or name in without)]


def request_headers(
    headers: Sequence[tuple[bytes, bytes]], *, client: str, scheme: str, replaced: Mapping[bytes, bytes]
) -> Headers:
    """The headers of a client that a server gets: all but those of the connection. Trace context goes on unchanged.

    Args:
        headers: The client's, names in small letters.
        client: Its address, which is added to X-Forwarded-For.
        scheme: How it reached the router.
        replaced: Headers that are set in place of the client's, or dropped if the value is empty.
    """
    given = dict(replaced)
    before = [value for name, value in headers if name == b"x-forwarded-for"]
    given[b"x-forwarded-for"] = b", ".join([*before, client.encode()])
    given.setdefault(b"x-forwarded-proto", scheme.encode())
    kept = without_hops(headers, without=_MADE_ANEW | given.keys())
    return kept + [(name, value) for name, value in given.items() if value]
