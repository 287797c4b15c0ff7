"""A client's request in the router: what is read of it, how it is sent on, and what is noted for log and metrics.

The router has no tokenizer. Blocks are cut from the JSON text of the fields that become the prompt, in the order in
which chat templates write them. Later turns of a conversation repeat the bytes before them, so equal blocks are equal
tokens. The reverse does not hold: the same JSON in another spelling has other blocks, where an engine may find a match.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
from starlette.types import Scope

from quire.errors import RequestError
from quire.foundation.http_client.http1 import Headers, HttpAddress
from quire.serving.api.request_record import write_line
from quire.serving.api.request_work import CLIENT_CLOSED_REQUEST
from quire.serving.replica_chooser import MAX_BLOCKS
from quire.serving.router.backend_list import KeyLimits

BLOCK_BYTES = 128
BYTES_PER_TOKEN = 4
"""Approximate bytes of a token in English text. It only serves to estimate loads."""
BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN
_DIGEST_BYTES = 16
HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Headers of one connection (RFC 9110, section 7.6.1). Headers that Connection names belong to it too."""
_MADE_ANEW = frozenset({b"host", b"content-length", b"expect"})
_MILLISECONDS = 3


class PromptFields(msgspec.Struct):
    """The fields of all endpoints that the router reads; all other fields are skipped."""

    model: str | None = None
    cache_salt: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()

    def prompt_parts(self) -> Sequence[bytes]:
        """The fields that become the prompt, as they stand in the body."""
        parts = (self.tools, self.system, self.instructions, self.messages, self.prompt, self.input, self.token_ids)
        return [bytes(part) for part in parts if part]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompt_parts())) // BYTES_PER_TOKEN


_decoder = msgspec.json.Decoder(PromptFields)


def read_fields(body: bytes) -> PromptFields:
    """Read the fields of a JSON body. Raises RequestError if the body is no JSON object."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(f"The request body cannot be routed: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("The request body must be a JSON object.") from None


def prefix_blocks(fields: PromptFields) -> list[bytes]:
    """The hash chain over the prompt's full blocks, up to the longest that matters.

    It starts from the model's name (or an adapter's) and the salt: engines share no blocks between these.
    """
    text = b"\0".join(fields.prompt_parts())
    chain, blocks = f"{fields.model or ''}\0{fields.cache_salt or ''}".encode(), []
    for end in range(BLOCK_BYTES, min(len(text), MAX_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        chain = blake2b(chain + text[end - BLOCK_BYTES : end], digest_size=_DIGEST_BYTES).digest()
        blocks.append(chain)
    return blocks


def session_blocks(session: str, fields: PromptFields) -> list[bytes]:
    """One block that stands for a session, so that all its requests have the same prefix."""
    return [blake2b(f"{fields.model or ''}\0session\0{session}".encode(), digest_size=_DIGEST_BYTES).digest()]


@dataclass(frozen=True)
class RoutedRequest:
    """A POST with its whole body. The path has the query; the headers are as they are sent, except those that depend on
    the server. `model` is None if the request names none. `blocks` are the beginning of its prompt, see
    `prefix_blocks`; the number of its tokens is estimated. `received` is in monotonic seconds."""

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
    """The headers of a client that a server gets: all but those of the connection, with names in small letters. The
    client's address is added to X-Forwarded-For. `replaced` has headers that are set in place of the client's, or
    dropped if the value is empty."""
    given = dict(replaced)
    before = [value for name, value in headers if name == b"x-forwarded-for"]
    given[b"x-forwarded-for"] = b", ".join([*before, client.encode()])
    given.setdefault(b"x-forwarded-proto", scheme.encode())
    kept = without_hops(headers, without=_MADE_ANEW | given.keys())
    return kept + [(name, value) for name, value in given.items() if value]


@dataclass
class Exchange:
    """What is known of a request so far.

    Attributes:
        began: Monotonic seconds.
        key: Whose request it is; None without keys.
        model: The model's name, if a server has it.
        backend: URL of the server that answers.
        status: What the client was sent; until then, that the client went away.
        first_byte_s: From arrival to the first byte of a server's answer.
        requests_left: How many more its key may send at once; None for any number.
    """

    began: float
    key: KeyLimits | None = None
    model: str = ""
    backend: str = ""
    status: int = CLIENT_CLOSED_REQUEST
    started: bool = False
    first_byte_s: float | None = None
    requests_left: int | None = None

    @property
    def key_name(self) -> str:
        return self.key.name if self.key else ""

    def log(self, scope: Scope, now: float) -> None:
        client = scope.get("client")
        fields: dict[str, Any] = {
            "client": f"{client[0]}:{client[1]}" if client else "-",
            "method": scope["method"],
            "path": scope["raw_path"].decode("ascii", "backslashreplace"),
            "status": self.status,
            "request_id": scope["state"]["request_id"],
            "duration_s": round(now - self.began, _MILLISECONDS),
        }
        if self.first_byte_s is not None:
            fields["first_byte_s"] = round(self.first_byte_s, _MILLISECONDS)
        rest = {"key": self.key_name, "model": self.model, "backend": self.backend}
        write_line(fields | {name: value for name, value in rest.items() if value}, scope["http_version"])
