"""Choices of /v1/chat/completions: messages with content, reasoning and tool calls.

Owns their JSON. Knows nothing about streams or the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.serving.api.assistant_message import assistant_message
from quire.serving.api.chat_logprobs import chat_logprobs, encode_chat_logprobs
from quire.serving.api.prompt_fields import PromptFields
from quire.serving.api.serializers import finish_fields, token_ids_field
from quire.serving.api.token_names import TokenNames
from quire.text.deltas import ChoiceDelta
from quire.text.output_parsers.events import ContentDelta, OutputEvent, ReasoningDelta, ToolCallDelta, ToolCallStart


class ChatSerializer:
    """Choices of /v1/chat/completions.

    Args:
        names: Names of tokens.
        logprobs: How many likeliest tokens are shown; None for no log probabilities.
        role: Of the message.
        prompt: Fields about the prompt.
        echo: Text that begins every message.
        token_ids: Whether `token_ids` are shown.
        reasoning: Whether reasoning is shown (`include_reasoning`).
        may_call: Whether the message may have tool calls in place of content.
        named_call: Whether it must call one function by name: then it ends with `stop`, as OpenAI's does.
    """

    def __init__(
        self,
        names: TokenNames,
        logprobs: int | None,
        role: str,
        prompt: PromptFields,
        *,
        echo: str = "",
        token_ids: bool = False,
        reasoning: bool = True,
        may_call: bool = False,
        named_call: bool = False,
    ) -> None:
        self.text_only = logprobs is None and not token_ids
        self._names = names
        self._logprobs = logprobs
        self._role = role
        self._prompt = prompt
        self._echo = echo
        self._token_ids = token_ids
        self._reasoning = reasoning
        self._may_call = may_call
        self._named_call = named_call

    def head(self, request_id: str, created: int, model: str, *, stream: bool) -> dict[str, Any]:
        name = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": f"chatcmpl-{request_id}", "created": created, "model": model, "object": name}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        content = None if self._may_call and not self._echo else self._echo
        choice = self._chunk(index, {"role": self._role, "content": content})
        return {"choices": [choice], **self._prompt.token_ids_field(0)}

    def chunks(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        deltas = [shown for event in delta.output if (shown := self._delta(event))]
        if not deltas:
            if not delta.tokens or self.text_only:
                return []
            deltas = [{"content": ""} if delta.events is None else {}]
        logprobs = None if self._logprobs is None else chat_logprobs(self._names, self._logprobs, delta)
        choices = [self._chunk(index, it) for it in deltas]
        choices[0] |= {"logprobs": logprobs, **token_ids_field(delta.tokens, self._token_ids)}
        return choices

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return choice | token_ids_field([], self._token_ids)

    def _delta(self, event: OutputEvent) -> dict[str, Any]:
        """OpenAI's `delta`; empty for what is not shown."""
        match event:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning": text, "reasoning_content": text} if self._reasoning else {}
            case ToolCallStart(index, name, call_id):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            case ToolCallDelta(index, arguments):
                return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}

    def last_chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {},
            "logprobs": None,
            **self._finish(delta),
            **token_ids_field([], self._token_ids),
        }

    def _finish(self, delta: ChoiceDelta) -> dict[str, Any]:
        fields = finish_fields(delta)
        if self._named_call and fields["finish_reason"] == "tool_calls":
            fields["finish_reason"] = "stop"
        return fields

    async def body(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        (prompt_logprobs,) = await self._prompt.logprobs_fields(choices)
        shown = []
        for index, choice in enumerate(choices):
            message = {"role": self._role, **self._message(choice)}
            logprobs = await encode_chat_logprobs(self._names, self._logprobs, choice)
            field = token_ids_field(choice.tokens, self._token_ids)
            shown.append({"index": index, "message": message, "logprobs": logprobs, **self._finish(choice), **field})
        return {"choices": shown, **prompt_logprobs, **self._prompt.token_ids_field(0)}

    def _message(self, choice: ChoiceDelta) -> dict[str, Any]:
        """OpenAI's `message` without its role. Content is null where there is something else instead."""
        said = assistant_message(choice.output)
        fields: dict[str, Any] = {"content": self._echo + said.content}
        if not fields["content"] and (said.tool_calls or said.reasoning):
            fields["content"] = None
        if said.reasoning and self._reasoning:
            fields |= {"reasoning": said.reasoning, "reasoning_content": said.reasoning}
        if said.tool_calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in said.tool_calls
            ]
        return fields
