"""A running response as OpenAI's events: the StreamFormat of /v1/responses.

Owns their numbers, and the response's body as it grows. A response that is not streamed is made in the same way, and
its events are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.foundation.clock import Clock
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.sse_chunks import EVENT_STREAM
from quire.serving.dialects.responses.output_items import Logprobs, OutputItems
from quire.serving.dialects.responses.response_body import failed, usage_field
from quire.text.deltas import ChoiceDelta

_encode = msgspec.json.Encoder().encode
_STATUS = {"stop": "completed", "tool_calls": "completed"}
"""By finish reason; all others leave the response incomplete."""


def sse(kind: str, data: bytes) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class ResponseEvents:
    """Writes one response.

    Args:
        head: The body of a response that has not begun, see `response_head`.
        choices: Its one choice.
        logprobs: Of tokens.
        clock: Seconds since 1970.
        on_end: Called with the last body of a stream.
        in_namespaces: See OutputItems.
        keep_events: Whether anybody reads the events.

    Attributes:
        body: The response as it is now.
        unread: Events that were not taken yet: number, type and JSON.
    """

    media_type = EVENT_STREAM

    def __init__(
        self,
        head: dict[str, Any],
        choices: RequestChoices,
        logprobs: Logprobs,
        clock: Clock,
        on_end: Callable[[dict[str, Any]], None],
        in_namespaces: Mapping[str, tuple[str, str]],
        *,
        keep_events: bool,
    ) -> None:
        self.body = head
        self.unread: list[tuple[int, str, bytes]] = []
        self._number = 0
        self._keep_events = keep_events
        self._choices = choices
        self._clock = clock
        self._on_end = on_end
        self._items = OutputItems(self._emit, logprobs, in_namespaces)
        self._finish_reason: str | None = None

    # --- StreamFormat -----------------------------------------------------------------------------------------------

    def delta(self, index: int, gained: ChoiceDelta) -> bytes:
        self.add(gained)
        return self.take()

    def end(self) -> bytes:
        self.finish()
        self._on_end(self.body)
        return self.take()

    def error(self, body: dict[str, Any]) -> bytes:
        self.fail(body["error"]["message"])
        self._on_end(self.body)
        return self.take()

    def take(self) -> bytes:
        """The events since the last call, as they are sent."""
        events, self.unread = self.unread, []
        return b"".join([sse(kind, data) for _, kind, data in events])

    # --- the response -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The events before anything is generated."""
        self._emit("response.created", {"response": self.body})
        if self.body["status"] == "queued":
            self._emit("response.queued", {"response": self.body})
            self.body = {**self.body, "status": "in_progress"}
        self._emit("response.in_progress", {"response": self.body})

    def add(self, gained: ChoiceDelta) -> None:
        """Go on with what the choice gained."""
        self._items.add(gained)
        self._finish_reason = gained.finish_reason or self._finish_reason

    def finish(self) -> None:
        """The choice has ended."""
        status = _STATUS.get(self._finish_reason or "", "incomplete")
        self._items.end(complete=status == "completed")
        reason = "max_output_tokens" if self._finish_reason == "length" else None
        self._end_as({
            **self.body,
            "status": status,
            "completed_at": int(self._clock.now()) if status == "completed" else None,
            "incomplete_details": None if status == "completed" else {"reason": reason},
            "output": self._items.items,
            "usage": usage_field(self._choices.usage(), self._items.reasoning_tokens),
        })  # fmt: skip

    def fail(self, message: str) -> None:
        """Something failed inside the server."""
        if self._items.items:
            self._items.end(complete=False)
        self._end_as({**failed(self.body, message), "output": self._items.items})

    def _end_as(self, body: dict[str, Any]) -> None:
        self.body = body
        self._emit(f"response.{body['status']}", {"response": body})

    def _emit(self, kind: str, fields: dict[str, Any]) -> None:
        if not self._keep_events:
            return
        data = _encode({"type": kind, "sequence_number": self._number, **fields})
        self.unread.append((self._number, kind, data))
        self._number += 1
