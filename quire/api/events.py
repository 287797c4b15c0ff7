"""A generation as server-sent events.

Owns the order of chunks: opening once, text, one end for each choice, usage when it is asked for, `[DONE]` once, also
after an error. Knows nothing about sockets.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from quire.api.errors import error_body, internal_error_body
from quire.api.generation import Generation
from quire.api.shapes import Shape
from quire.errors import QuireError
from quire.text.choice import Piece

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One event with a JSON body."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventWriter:
    """Writes one request's stream.

    Args:
        head: id, created and model of every chunk.
        shape: How choices are written.
        generation: What is written.
        last_usage, every_usage: Token counts in a chunk of their own at the end, and in all chunks.
        request_id: For the log.
    """

    def __init__(
        self,
        head: dict[str, Any],
        shape: Shape,
        generation: Generation,
        usage: tuple[bool, bool],
        request_id: str,
    ) -> None:
        self._head = {**head, "object": shape.chunk_name}
        self._shape = shape
        self._generation = generation
        self._last_usage, self._every_usage = usage
        self._request_id = request_id
        self._opened: set[int] = set()

    async def write(self) -> AsyncIterator[bytes]:
        """The events; those of one step together."""
        try:
            async for news in self._generation.pieces():
                data = b"".join(self._chunks(index, piece) for index, piece in news)
                if data:
                    yield data
            if self._last_usage:
                yield event({**self._head, "choices": [], "usage": self._generation.usage()})
        except QuireError as error:
            yield event(error_body(error))
        except Exception:
            logger.exception("Request %s failed while it was streamed.", self._request_id)
            yield event(internal_error_body(self._request_id))
        yield DONE

    def _chunks(self, index: int, piece: Piece) -> bytes:
        choices = []
        if index not in self._opened:
            self._opened.add(index)
            choices.append(self._shape.opening(index))
        if piece.text or piece.logprobs:
            choices.append(self._shape.gain(index, piece))
        if piece.finish_reason is not None:
            choices.append(self._shape.closing(index, piece))
        return b"".join(self._chunk(choice) for choice in choices if choice is not None)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        body = {**self._head, "choices": [choice]}
        if self._every_usage:
            body["usage"] = self._generation.usage()
        elif self._last_usage:
            body["usage"] = None
        return event(body)
