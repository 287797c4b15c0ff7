"""A request's choices as OpenAI's server-sent events.

Owns the order of chunks: a first one, text, one end for each choice, usage when it is asked for, `[DONE]` once, also
after an error. Knows nothing about sockets.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from quire.serving.api.serializers import Serializer
from quire.text.deltas import ChoiceDelta
from quire.text.output_parsers.events import ContentDelta, OutputEvent

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
_ANY_TEXT = "\0"
_encode = msgspec.json.Encoder().encode


def event(body: dict[str, Any]) -> bytes:
    """One event with a JSON body."""
    return b"data: " + _encode(body) + b"\n\n"


class Choices(Protocol):
    """The choices of a request: RequestChoices, or those that a beam search has found."""

    async def collect(self) -> list[ChoiceDelta]: ...

    def usage(self) -> dict[str, Any]: ...

    def usage_of(self, index: int, num_tokens: int | None = None) -> dict[str, int]: ...


class SseChunks:
    """The AnswerFormat of OpenAI's endpoints: chunks, or a body.

    Args:
        head: Fields that begin the body and every chunk: id, created, model, object.
        serializer: Writes choices.
        choices: What is written.
        usage: Whether token counts stand in a chunk of their own at the end, and whether in all chunks.
    """

    media_type = EVENT_STREAM

    def __init__(
        self,
        head: dict[str, Any],
        serializer: Serializer,
        choices: Choices,
        usage: tuple[bool, bool],
    ) -> None:
        self._head = head
        self._serializer = serializer
        self._choices = choices
        self._last_usage, self._every_usage = usage
        self._text_only = serializer.text_only and not self._every_usage
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # by choice, of those that have begun

    async def body(self) -> dict[str, Any]:
        outputs = await self._choices.collect()
        return {**self._head, **await self._serializer.body(outputs), "usage": self._choices.usage()}

    def delta(self, index: int, gained: ChoiceDelta) -> bytes:
        data = b""
        if index not in self._around_text:
            self._around_text[index] = self._split_at_text(index) if self._text_only else (b"", b"")
            if (first := self._serializer.first_chunk(index)) is not None:
                data = self._chunk(index, first, num_tokens=0)
        text = gained.text if gained.events is None else _only_content(gained.events)
        if self._text_only and text is not None:
            if text:
                before, behind = self._around_text[index]
                data += before + _encode(text) + behind
        else:
            for choice in self._serializer.chunks(index, gained):
                data += self._chunk(index, {"choices": [choice]})
        if gained.finish_reason is not None:
            data += self._chunk(index, {"choices": [self._serializer.last_chunk(index, gained)]})
        return data

    def end(self) -> bytes:
        if not self._last_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._choices.usage()}) + DONE

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body) + DONE

    def _split_at_text(self, index: int) -> tuple[bytes, bytes]:
        """A choice's chunk before and after its text. From one chunk to the next only the text differs."""
        chunk = self._chunk(index, {"choices": self._serializer.chunks(index, ChoiceDelta(_ANY_TEXT))})
        before, _, behind = chunk.rpartition(_encode(_ANY_TEXT))
        return before, behind

    def _chunk(self, index: int, fields: dict[str, Any], num_tokens: int | None = None) -> bytes:
        """A chunk of one choice.

        Args:
            num_tokens: Tokens of the choice up to here; by default all that it has.
        """
        body = {**self._head, **fields}
        if self._every_usage:
            body["usage"] = self._choices.usage_of(index, num_tokens)
        elif self._last_usage:
            body["usage"] = None
        return event(body)


def _only_content(events: list[OutputEvent]) -> str | None:
    """The content that a parser has found, if it has found nothing else; merged, that is one event."""
    if not events:
        return ""
    return events[0].text if len(events) == 1 and isinstance(events[0], ContentDelta) else None
