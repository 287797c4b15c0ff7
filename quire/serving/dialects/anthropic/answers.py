"""Answers as Anthropic's messages: whole, and as events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quire.serving.api.chat_serializer import assistant_message
from quire.serving.api.error_responses import anthropic_error
from quire.serving.api.request_choices import RequestChoices
from quire.serving.dialects.dialect import call_input, named_event
from quire.text.deltas import ChoiceDelta
from quire.text.output_parsers.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)

SIGNATURE = "unsigned"
"""Clients want thinking to be signed; it is not checked when it comes back."""
BlockType = Literal["text", "thinking", "tool_use"]
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


@dataclass
class AnthropicAnswers:
    """The answer to one request, which has one choice; an AnswerFormat."""

    request_id: str
    model: str
    choices: RequestChoices
    show_thinking: bool = True
    _begun: bool = False
    _blocks: int = 0  # begun so far
    _open: BlockType | None = None

    media_type = "text/event-stream"

    @property
    def _head(self) -> dict[str, Any]:
        return {"id": f"msg_{self.request_id}", "type": "message", "role": "assistant", "model": self.model}

    async def body(self) -> dict[str, Any]:
        (whole,) = await self.choices.collect()
        message = assistant_message(whole.output)
        content: list[dict[str, Any]] = []
        if message.reasoning and self.show_thinking:
            content.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
        if message.content:
            content.append({"type": "text", "text": message.content})
        for call in message.tool_calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call_input(call.arguments)})
        return {**self._head, "content": content, **_stop(whole), "usage": self._usage()}

    def delta(self, index: int, gained: ChoiceDelta) -> bytes:
        data = b"" if self._begun else self._begin()
        for event in gained.output:
            data += self._event(event)
        if gained.finish_reason is not None:
            data += self._close_block()
            data += _event("message_delta", delta=_stop(gained), usage=self._usage())
        return data

    def end(self) -> bytes:
        return _event("message_stop")

    def error(self, body: dict[str, Any]) -> bytes:
        error = anthropic_error(503 if body["error"]["code"] == "unavailable" else 500, body, self.request_id)
        return named_event("error", error)

    def _begin(self) -> bytes:
        self._begun = True
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return _event("message_start", message=self._head | empty) + _event("ping")

    def _event(self, event: OutputEvent) -> bytes:
        match event:
            case ContentDelta(text) if text:
                return self._in_block("text", {"text": ""}, {"type": "text_delta", "text": text})
            case ReasoningDelta(text) if text and self.show_thinking:
                start = {"thinking": "", "signature": ""}
                return self._in_block("thinking", start, {"type": "thinking_delta", "thinking": text})
            case ToolCallStart(_, name, call_id):
                return self._open_block("tool_use", {"id": call_id, "name": name, "input": {}})
            case ToolCallDelta(_, arguments) if arguments:
                return self._delta({"type": "input_json_delta", "partial_json": arguments})
        return b""

    def _in_block(self, kind: BlockType, start: dict[str, Any], delta: dict[str, Any]) -> bytes:
        opened = b"" if self._open == kind else self._open_block(kind, start)
        return opened + self._delta(delta)

    def _open_block(self, kind: BlockType, start: dict[str, Any]) -> bytes:
        data = self._close_block()
        self._open = kind
        self._blocks += 1
        return data + _event("content_block_start", index=self._blocks - 1, content_block={"type": kind, **start})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close_block(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = None
        return signed + _event("content_block_stop", index=self._blocks - 1)

    def _usage(self) -> dict[str, Any]:
        """The token counts. Anthropic counts cached tokens apart from the others."""
        usage = self.choices.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _stop(whole: ChoiceDelta) -> dict[str, Any]:
    if whole.finish_reason == "stop" and isinstance(whole.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": whole.stop_reason}
    return {"stop_reason": _STOP_REASONS.get(whole.finish_reason or "", "end_turn"), "stop_sequence": None}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
