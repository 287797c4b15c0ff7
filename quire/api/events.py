"""A generation as server-sent events.

Owns the order of chunks: opening once, text, one end for each choice, usage when it is asked for, `[DONE]` once, also
after an error. Knows nothing about sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from quire.api.errors import error_body, internal_error_body
from quire.api.generation import Generation
from quire.api.shapes import Shape
from quire.errors import QuireError
from quire.text.choice import Delta, Piece

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_ANY_TEXT = "\0"
_encode = msgspec.json.Encoder().encode


def event(body: dict[str, Any]) -> bytes:
    """One event with a JSON body."""
    return b"data: " + _encode(body) + b"\n\n"


class EventWriter:
    """Writes one request's stream.

    Args:
        head: id, created and model of every chunk.
        shape: How choices are written.
        generation: What is written.
        last_usage, every_usage: Token counts in a chunk of their own at the end, and in all chunks.
        request_id: For the log.

    Attributes:
        finished: Whether the last event was written.
    """

    def __init__(
        self,
        head: dict[str, Any],
        shape: Shape,
        generation: Generation,
        usage: tuple[bool, bool],
        request_id: str,
    ) -> None:
        self.finished = False
        self._head = {**head, "object": shape.chunk_name}
        self._shape = shape
        self._generation = generation
        self._last_usage, self._every_usage = usage
        self._detailed = self._every_usage or not shape.text_only
        self._request_id = request_id
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # by choice, of those that were opened

    async def news(self, at_once: Callable[[bytes], bool]) -> bytes:
        """The events that are to be written next, those that wait together.

        Args:
            at_once: While none waits, gets the events of what comes, in the moment in which it comes; whether it can
                take more.
        """

        def hand_over(index: int, delta: Delta) -> bool:
            data = self._events(index, delta)
            return (not data or at_once(data)) and not self.finished

        try:
            return b"".join([self._events(index, delta) for index, delta in await self._generation.read(hand_over)])
        except QuireError as error:
            return self._failed(error_body(error))
        except Exception:
            logger.exception("Request %s failed while it was streamed.", self._request_id)
            return self._failed(internal_error_body(self._request_id))

    def _failed(self, body: dict[str, Any]) -> bytes:
        self.finished = True
        return event(body) + DONE

    def _events(self, index: int, delta: Delta) -> bytes:
        """What a choice gained, and behind the end of the last one that of the stream."""
        piece = self._generation.take(index, delta)
        if piece is None:
            return b""
        data = self._chunks(index, piece)
        if self._generation.finished:
            self.finished = True
            if self._last_usage:
                data += event({**self._head, "choices": [], "usage": self._generation.usage()})
            data += DONE
        return data

    def _chunks(self, index: int, piece: Piece) -> bytes:
        data = b""
        if index not in self._around_text:
            self._around_text[index] = self._split_at_text(index)
            if (opening := self._shape.opening(index)) is not None:
                data = self._chunk(opening)
        if self._detailed:
            if piece.text or (piece.tokens and not self._shape.text_only):
                data += self._chunk({"choices": [self._shape.gain(index, piece)]})
        elif piece.text:
            before, behind = self._around_text[index]
            data += before + _encode(piece.text) + behind
        if piece.finish_reason is not None:
            data += self._chunk({"choices": [self._shape.closing(index, piece)]})
        return data

    def _split_at_text(self, index: int) -> tuple[bytes, bytes]:
        """A choice's chunk before and behind its text: all that differs from one to the next is that."""
        chunk = self._chunk({"choices": [self._shape.gain(index, Piece(_ANY_TEXT))]})
        before, _, behind = chunk.rpartition(_encode(_ANY_TEXT))
        return before, behind

    def _chunk(self, fields: dict[str, Any]) -> bytes:
        body = {**self._head, **fields}
        if self._every_usage:
            body["usage"] = self._generation.usage()
        elif self._last_usage:
            body["usage"] = None
        return event(body)
