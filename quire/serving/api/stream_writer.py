"""A request's choices as a stream of bytes, in the format of one endpoint.

Owns waiting for output, and that every stream ends: after the last choice, or after an error. Knows no format and
nothing about sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from quire.errors import QuireError
from quire.serving.api.error_responses import error_body, internal_error_body
from quire.serving.api.request_choices import RequestChoices
from quire.text.deltas import ChoiceDelta, SequenceDelta

logger = logging.getLogger(__name__)


class StreamFormat(Protocol):
    """How one endpoint writes a stream. Made for one request; called in order."""

    media_type: str

    def delta(self, index: int, gained: ChoiceDelta) -> bytes:
        """What is written when a choice has gained something, its end included; may be empty."""
        ...

    def end(self) -> bytes:
        """What is written once the last choice has ended."""
        ...

    def error(self, body: dict[str, Any]) -> bytes:
        """What is written in place of all that would follow.

        Args:
            body: OpenAI's: `error` with `message`, `type`, `param` and `code`.
        """
        ...


class StreamWriter:
    """Writes one request's stream.

    Args:
        format: How it is written.
        choices: What is written.
        request_id: For the log.
        head: Written at once, before there is any output.

    Attributes:
        finished: Whether the last of it was written.
    """

    def __init__(self, format: StreamFormat, choices: RequestChoices, request_id: str, head: bytes = b"") -> None:
        self.finished = False
        self._head = head
        self._format = format
        self._choices = choices
        self._request_id = request_id

    @property
    def media_type(self) -> str:
        """Of the response."""
        return self._format.media_type

    async def wait(self) -> None:
        """Until it is known that the request is begun; at once for one without a deadline.

        Raises:
            QuireError: It failed before.
        """
        if self._choices.has_deadline:
            await self._choices.wait()

    def close(self) -> None:
        """Nobody reads any more: what still runs is aborted."""
        self._choices.close()

    async def next(self, write_now: Callable[[bytes], bool]) -> bytes:
        """Wait for output; returns what `write_now` has not taken, together.

        Args:
            write_now: Called with output as soon as there is any; returns whether it can take more.
        """

        def on_delta(index: int, delta: SequenceDelta) -> bool:
            data = self._written(index, delta)
            return (not data or write_now(data)) and not self.finished

        if self._head:
            head, self._head = self._head, b""
            return head
        try:
            return b"".join([self._written(index, delta) for index, delta in await self._choices.read(on_delta)])
        except QuireError as error:
            return self._failed(error_body(error))
        except Exception:
            logger.exception("Request %s failed while it was streamed.", self._request_id)
            return self._failed(internal_error_body(self._request_id))

    def _failed(self, body: dict[str, Any]) -> bytes:
        self.finished = True
        return self._format.error(body)

    def _written(self, index: int, delta: SequenceDelta) -> bytes:
        """What a choice gained; after the end of the last choice also the end of the stream."""
        gained = self._choices.process(index, delta)
        if gained is None:
            return b""
        data = self._format.delta(index, gained)
        if self._choices.finished:
            self.finished = True
            data += self._format.end()
        return data
