"""Choices of /v1/chat/completions: the JSON of messages with content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.serving.api.token_fields import PromptFields, TokenNames, chat_logprobs, encode_chat_logprobs
from quire.text.deltas import ChoiceDelta
from quire.text.output_parsers.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)


@dataclass(frozen=True)
class ToolCall:
    """A call of a function, with JSON text as its `arguments`, as the model wrote it; or of a `custom` tool, of which
    they are the input."""

    id: str
    name: str
    arguments: str
    custom: bool = False


@dataclass(frozen=True)
class AssistantMessage:
    """The content, reasoning and calls of a choice."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def assistant_message(output: Sequence[OutputEvent]) -> AssistantMessage:
    """The message that all events of a choice add up to (`ChoiceDelta.output`)."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: dict[int, list[str]] = {}
    for event in output:
        match event:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart(index):
                starts.append(event)
                arguments[index] = []
            case ToolCallDelta(index, piece):
                arguments[index].append(piece)
    calls = (ToolCall(start.id or "", start.name, "".join(arguments[start.index]), start.custom) for start in starts)
    return AssistantMessage("".join(content), "".join(reasoning), tuple(calls))


@dataclass(frozen=True)
class ChatSerializer:
    """Writes choices of /v1/chat/completions.

    Attributes:
        logprobs: How many likeliest tokens are shown; None for no log probabilities.
        echo: Text that begins every message.
        may_call: Whether the message may have tool calls in place of content.
        named_call: Whether the message must call one function by name: then it ends with `stop`, as OpenAI's does.
    """

    names: TokenNames
    logprobs: int | None
    role: str
    prompt: PromptFields
    echo: str = ""
    token_ids: bool = False
    reasoning: bool = True
    may_call: bool = False
    named_call: bool = False

    @property
    def text_only(self) -> bool:
        return self.logprobs is None and not self.token_ids

    def head(self, request_id: str, created: int, model: str, *, stream: bool) -> dict[str, Any]:
        name = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": f"chatcmpl-{request_id}", "created": created, "model": model, "object": name}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        content = None if self.may_call and not self.echo else self.echo
        choice = self._chunk(index, {"role": self.role, "content": content})
        return {"choices": [choice], **self.prompt.token_ids_field(0)}

    def chunks(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        deltas = [shown for event in delta.output if (shown := self._delta(event))]
        if not deltas:
            if not delta.tokens or self.text_only:
                return []
            deltas = [{"content": ""} if delta.events is None else {}]
        logprobs = None if self.logprobs is None else chat_logprobs(self.names, self.logprobs, delta)
        choices = [self._chunk(index, it) for it in deltas]
        choices[0] |= {"logprobs": logprobs, **token_ids_field(delta.tokens, self.token_ids)}
        return choices

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return choice | token_ids_field([], self.token_ids)

    def _delta(self, event: OutputEvent) -> dict[str, Any]:
        """OpenAI's `delta`; empty for what is not shown."""
        match event:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning": text, "reasoning_content": text} if self.reasoning else {}
            case ToolCallStart(index, name, call_id, custom):
                return {"tool_calls": [{"index": index, "id": call_id, **called(name, "", custom=custom)}]}
            case ToolCallDelta(index, text, custom=True):
                return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
            case ToolCallDelta(index, arguments):
                return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}

    def last_chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return self._chunk(index, {}) | self._finish(delta)

    def _finish(self, delta: ChoiceDelta) -> dict[str, Any]:
        fields = finish_fields(delta)
        if self.named_call and fields["finish_reason"] == "tool_calls":
            fields["finish_reason"] = "stop"
        return fields

    async def body(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        (prompt_logprobs,) = await self.prompt.logprobs_fields(choices)
        shown = []
        for index, choice in enumerate(choices):
            message = {"role": self.role, **self._message(choice)}
            logprobs = await encode_chat_logprobs(self.names, self.logprobs, choice)
            field = token_ids_field(choice.tokens, self.token_ids)
            shown.append({"index": index, "message": message, "logprobs": logprobs, **self._finish(choice), **field})
        return {"choices": shown, **prompt_logprobs, **self.prompt.token_ids_field(0)}

    def _message(self, choice: ChoiceDelta) -> dict[str, Any]:
        """OpenAI's `message` without its role. Content is null where there is reasoning or a call instead."""
        said = assistant_message(choice.output)
        fields: dict[str, Any] = {"content": self.echo + said.content}
        if not fields["content"] and (said.tool_calls or said.reasoning):
            fields["content"] = None
        if said.reasoning and self.reasoning:
            fields |= {"reasoning": said.reasoning, "reasoning_content": said.reasoning}
        if said.tool_calls:
            fields["tool_calls"] = [
                {"id": call.id, **called(call.name, call.arguments, custom=call.custom)} for call in said.tool_calls
            ]
        return fields


def called(name: str, arguments: str, *, custom: bool) -> dict[str, Any]:
    """What a call says of the function, or of the custom tool and its input."""
    if custom:
        return {"type": "custom", "custom": {"name": name, "input": arguments}}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def token_ids_field(tokens: list[int], shown: bool) -> dict[str, Any]:
    """`token_ids`, if the request asked for them."""
    return {"token_ids": tokens} if shown else {}


def finish_fields(delta: ChoiceDelta) -> dict[str, Any]:
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
