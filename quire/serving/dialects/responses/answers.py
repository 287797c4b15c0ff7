"""A running response in OpenAI's JSON: its body as it grows, and its numbered events.

A response that is not streamed is made in the same way, and its events are not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.foundation.clock import Clock
from quire.sampling_params import SamplingParams
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.stream_response import EVENT_STREAM
from quire.serving.dialects.dialect import encoded_event
from quire.serving.dialects.responses.output_items import Logprobs, OutputItems
from quire.serving.dialects.responses.schemas import ResponsesRequest, TextFormat
from quire.serving.dialects.responses.tools import ResponseTools
from quire.text.deltas import ChoiceDelta

_encode = msgspec.json.Encoder().encode
_STATUS = {"stop": "completed", "tool_calls": "completed"}
"""The status by finish reason; all others leave the response incomplete."""
ABANDONED = "The server stopped while it worked on this response. Send the request again."


def response_head(
    fields: ResponsesRequest,
    response_id: str,
    created: float,
    model: str,
    params: SamplingParams,
    tools: ResponseTools,
    *,
    stored: bool,
) -> dict[str, Any]:
    """All fields of a response that has not begun. It was `created` in seconds since 1970."""
    form = fields.text.format if fields.text else None
    reasoning = fields.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(created),
        "completed_at": None,
        "status": "queued" if fields.background else "in_progress",
        "background": bool(fields.background),
        "error": None,
        "frequency_penalty": params.frequency_penalty,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "temperature": params.temperature,
        "text": {
            "format": _format(form),
            "verbosity": (fields.text.verbosity if fields.text else None) or "medium",
        },
        "tool_choice": fields.tool_choice or "auto",
        "tools": [_shown(tool) for tool in tools.shown],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": fields.truncation or "disabled",
        "usage": None,
        "user": fields.user,
    }


def _format(form: TextFormat | None) -> dict[str, Any]:
    if form is None:
        return {"type": "text"}
    optional = {"description": None, "strict": False} if form.type == "json_schema" else {}
    return optional | form.model_dump(by_alias=True, exclude_none=True)


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool


def failed(body: dict[str, Any], message: str) -> dict[str, Any]:
    """The response after something failed inside the server."""
    return {**body, "status": "failed", "error": {"code": "server_error", "message": message}}


@dataclass
class ResponseAnswers:
    """Writes one response, which has one choice; an AnswerFormat. `response` is its body as it is now, at first what
    `response_head` returned, and `on_end` is called with the last body of a stream. If anybody reads the events
    (`keep_events`), `unread` has those that were not taken yet: number, type and JSON."""

    response: dict[str, Any]
    choices: RequestChoices
    logprobs: Logprobs
    clock: Clock
    on_end: Callable[[dict[str, Any]], None]
    tools: ResponseTools
    keep_events: bool
    unread: list[tuple[int, str, bytes]] = field(default_factory=list)
    _number: int = 0
    _finish_reason: str | None = None

    media_type = EVENT_STREAM

    def __post_init__(self) -> None:
        self._items = OutputItems(self._emit, self.logprobs, self.tools)

    async def body(self) -> dict[str, Any]:
        await self.choices.read_all(lambda _, gained: self.add(gained))
        self.finish()
        return self.response

    def delta(self, index: int, gained: ChoiceDelta) -> bytes:
        self.add(gained)
        return self.take()

    def end(self) -> bytes:
        self.finish()
        self.on_end(self.response)
        return self.take()

    def error(self, body: dict[str, Any]) -> bytes:
        self.fail(body["error"]["message"])
        self.on_end(self.response)
        return self.take()

    def take(self) -> bytes:
        """The events since the last call, as they are sent."""
        events, self.unread = self.unread, []
        return b"".join([encoded_event(kind, data) for _, kind, data in events])

    def begin(self) -> None:
        """Write the events before anything is generated."""
        self._emit("response.created", {"response": self.response})
        if self.response["status"] == "queued":
            self._emit("response.queued", {"response": self.response})
            self.response = {**self.response, "status": "in_progress"}
        self._emit("response.in_progress", {"response": self.response})

    def add(self, gained: ChoiceDelta) -> None:
        """Go on with what the choice gained."""
        self._items.add(gained)
        self._finish_reason = gained.finish_reason or self._finish_reason

    def finish(self) -> None:
        """End the response, because the choice has ended."""
        status = _STATUS.get(self._finish_reason or "", "incomplete")
        self._items.end(complete=status == "completed")
        reason = "max_output_tokens" if self._finish_reason == "length" else None
        self._end_as({
            **self.response,
            "status": status,
            "completed_at": int(self.clock.now()) if status == "completed" else None,
            "incomplete_details": None if status == "completed" else {"reason": reason},
            "output": self._items.items,
            "usage": self._usage(),
        })  # fmt: skip

    def fail(self, message: str) -> None:
        """End the response, because something failed inside the server."""
        if self._items.items:
            self._items.end(complete=False)
        self._end_as({**failed(self.response, message), "output": self._items.items})

    def _usage(self) -> dict[str, Any]:
        usage = self.choices.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _end_as(self, body: dict[str, Any]) -> None:
        self.response = body
        self._emit(f"response.{body['status']}", {"response": body})

    def _emit(self, kind: str, fields: dict[str, Any]) -> None:
        if not self.keep_events:
            return
        data = _encode({"type": kind, "sequence_number": self._number, **fields})
        self.unread.append((self._number, kind, data))
        self._number += 1
