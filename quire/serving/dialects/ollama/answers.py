"""Answers in Ollama's form: lines of JSON, or one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from quire.foundation.clock import Clock
from quire.serving.api.chat_serializer import assistant_message
from quire.serving.api.request_choices import RequestChoices
from quire.serving.dialects.dialect import call_input
from quire.text.deltas import ChoiceDelta
from quire.text.output_parsers.events import ContentDelta, OutputEvent, ReasoningDelta, ToolCallDelta, ToolCallStart

Kind = Literal["chat", "generate"]


def timestamp(seconds: float) -> str:
    """A point in time since 1970, as Go writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@dataclass
class OllamaAnswers:
    """The answer to one request, which has one choice and came at `began` by `clock`; an AnswerFormat."""

    kind: Kind
    model: str
    choices: RequestChoices
    clock: Clock
    wall: Clock
    began: float
    show_thinking: bool = True
    _calls: int = 0  # begun so far
    _call: ToolCallStart | None = None  # whose arguments are coming
    _arguments: list[str] = field(default_factory=list)

    media_type = "application/x-ndjson"

    async def body(self) -> dict[str, Any]:
        (whole,) = await self.choices.collect()
        message = assistant_message(whole.output)
        calls = [_call(i, call.id, call.name, call.arguments) for i, call in enumerate(message.tool_calls)]
        thinking = message.reasoning if self.show_thinking else ""
        return self._part(message.content, thinking, calls) | self._end(whole)

    def delta(self, index: int, gained: ChoiceDelta) -> bytes:
        data = b"".join(self._line(event) for event in gained.output)
        if gained.finish_reason is not None:
            data += self._finished_call()
            data += _encoded(self._part("") | self._end(gained))
        return data

    def end(self) -> bytes:
        return b""

    def error(self, body: dict[str, Any]) -> bytes:
        return _encoded({"error": body["error"]["message"]})

    def _line(self, event: OutputEvent) -> bytes:
        """The lines that say an event. A call is one line, once it is whole."""
        match event:
            case ContentDelta(text) if text:
                return self._finished_call() + _encoded(self._part(text))
            case ReasoningDelta(text) if text and self.show_thinking:
                return _encoded(self._part("", text))
            case ToolCallStart():
                before = self._finished_call()
                self._call, self._arguments = event, []
                return before
            case ToolCallDelta(_, arguments):
                self._arguments.append(arguments)
        return b""

    def _finished_call(self) -> bytes:
        if self._call is None:
            return b""
        call = _call(self._calls, self._call.id, self._call.name, "".join(self._arguments))
        self._call = None
        self._calls += 1
        return _encoded(self._part("", calls=[call]))

    def _part(self, text: str, thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        head = {"model": self.model, "created_at": timestamp(self.wall.now())}
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = calls
        if self.kind == "generate":
            return {**head, "response": text, **more, "done": False}
        return {**head, "message": {"role": "assistant", "content": text, **more}, "done": False}

    def _end(self, whole: ChoiceDelta) -> dict[str, Any]:
        now = self.clock.now()
        first = self.choices.first_token
        first = now if first is None else first
        usage = self.choices.usage()
        return {
            "done": True,
            "done_reason": "length" if whole.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(now - self.began),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first - self.began),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(now - first),
        }


def loaded(kind: Kind, model: str, wall: Clock, *, unload: bool) -> dict[str, Any]:
    """The answer to a request without a prompt, by which clients load a model or unload it."""
    text: dict[str, Any] = {"response": ""} if kind == "generate" else {"message": {"role": "assistant", "content": ""}}
    reason = "unload" if unload else "load"
    return {"model": model, "created_at": timestamp(wall.now()), **text, "done": True, "done_reason": reason}


def _call(index: int, call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    function = {"index": index, "name": name, "arguments": call_input(arguments)}
    return {"id": call_id, "function": function} if call_id else {"function": function}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _encoded(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body) + b"\n"
