"""JSON that is made and sent in pieces, and how large an answer may get.

A long answer is never one string, whose copies would hold the event loop: other requests' tokens go on in between.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import RequestError
from quire.sampling_params import SamplingParams

PIECE_BYTES = 2**18
"""About how many bytes are sent in one turn of the event loop."""
SLOW_READER_S = 30.0
"""Seconds after which a client that takes nothing is disconnected."""
SLICE_ENTRIES = 512
"""Log probabilities that are written in one turn of the event loop: about 2 ms of work."""
_encode = msgspec.json.Encoder().encode
MAX_ENTRIES = 2**22
"""Maximum number of log probabilities and prompt tokens in one answer: as JSON some 200 to 400 MB."""


class JsonPieces:
    """A value of a JSON body that was written already; its pieces are cut anywhere."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces


def write_json(body: Any) -> list[bytes]:
    """The JSON of a body that may have JsonPieces in it; one piece if it has none."""
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
    """Sends a body in pieces, each when the client has read enough of the ones before."""

    media_type = "application/json"

    def __init__(
        self,
        pieces: Sequence[bytes],
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        length = {"content-length": str(sum(map(len, pieces)))}
        super().__init__(status_code=status, headers={**(headers or {}), **length}, media_type=media_type)
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


async def encode_in_slices(
    make: Callable[[int, int], dict[str, list[Any]]], num_rows: int, entries_per_row: int
) -> dict[str, JsonPieces]:
    """Columns as JSON arrays, from `make`, which is called for one range of rows after the other.

    A row costs `entries_per_row`; SLICE_ENTRIES bounds the cost of a range.
    """
    step = max(1, SLICE_ENTRIES // entries_per_row)
    parts: dict[str, list[bytes]] = {name: [b"["] for name in make(0, 0)}
    for start in range(0, num_rows, step):
        for name, rows in make(start, min(start + step, num_rows)).items():
            parts[name].append((b"," if start else b"") + _encode(rows)[1:-1])
        await asyncio.sleep(0)
    return {name: JsonPieces([*slices, b"]"]) for name, slices in parts.items()}


def check_answer_size(
    prompt_lens: Sequence[int],
    params: SamplingParams,
    *,
    num_choices: int,
    longest: int,
    prompts_shown: int,
    held: bool,
) -> None:
    """Raise RequestError for a request whose answer might be too large, before anything runs for it.

    An answer repeats its prompt for each of n choices, and log probabilities multiply every position: a few numbers in
    a small request would make gigabytes. `prompts_shown` tells how often each prompt is in the answer, as text, token
    ids or log probabilities, and `held` whether all output is held; a stream writes output as it comes.
    """
    if params.truncate_prompt_tokens is not None:
        keep = params.truncate_prompt_tokens if params.truncate_prompt_tokens > 0 else longest
        prompt_lens = [min(length, keep) for length in prompt_lens]
    asked = params.num_reported
    shown = sum(prompt_lens) * prompts_shown * (1 + (params.prompt_logprobs or 0))
    if asked is not None and held:
        most = sum(min(params.max_tokens or longest, max(1, longest - length)) for length in prompt_lens)
        shown += num_choices * most * (1 + asked)
    if shown > MAX_ENTRIES:
        streaming = " Streamed, log probabilities of the output do not count." if asked is not None else ""
        raise RequestError(
            f"The answer might have {shown} entries: prompts × n × (1 + prompt_logprobs), and with logprobs n × "
            f"max_tokens × (1 + logprobs). This server puts at most {MAX_ENTRIES} into one: lower one of these."
            + streaming,
            param="n" if num_choices > 1 else "prompt_logprobs" if params.prompt_logprobs is not None else "logprobs",
        )
