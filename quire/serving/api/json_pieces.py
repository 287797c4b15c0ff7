"""JSON that is made in pieces and sent in pieces: a long answer is never one string, whose copies would hold the loop.

Knows nothing about what the JSON says.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES = 2**18
"""About what is sent in one turn of the event loop."""
SLOW_READER_S = 30.0
"""A client that takes nothing for so long is disconnected."""


class JsonPieces:
    """A value of a JSON body that was written already.

    Args:
        pieces: Its JSON, cut anywhere.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces


def write_json(body: Any) -> list[bytes]:
    """The JSON of a body which may have JsonPieces in it; one piece if it has none."""
    mark, inserted = secrets.token_hex(16).encode(), list[JsonPieces]()

    def insert(value: object) -> msgspec.Raw:
        assert isinstance(value, JsonPieces)
        inserted.append(value)
        return msgspec.Raw(mark)

    first, *others = msgspec.json.encode(body, enc_hook=insert).split(mark)
    pieces = [first]
    for value, behind in zip(inserted, others, strict=True):
        pieces += [*value.pieces, behind]
    return pieces


class PiecesResponse(Response):
    """Sends a body in pieces, each when the client has read enough of those before."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], status: int = 200) -> None:
        super().__init__(status_code=status, headers={"content-length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for data in _joined(self._pieces):
            async with asyncio.timeout(SLOW_READER_S):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _joined(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """Join small pieces and cut large ones, into chunks of about PIECE_BYTES that are worth a write."""
    waiting, size = list[bytes](), 0
    for piece in pieces:
        for at in range(0, len(piece), PIECE_BYTES):
            part = piece if len(piece) <= PIECE_BYTES else piece[at : at + PIECE_BYTES]
            waiting.append(part)
            size += len(part)
            if size >= PIECE_BYTES:
                yield b"".join(waiting)
                waiting, size = [], 0
    yield b"".join(waiting)
