"""Anthropic's conversations as ChatRequests.

Owns what each field means as a chat. Knows nothing about responses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quire.api.request_body import check_fields
from quire.api.schemas.chat import ChatRequest
from quire.api.schemas.messages import (
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    Message,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from quire.errors import RequestError
from quire.text.hints import THINKING_SWITCHES

_NAMES = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
}
"""Fields of a ChatRequest by their names in Anthropic's body, where these differ."""


def chat_request(
    body: CountTokensRequest, variables: Collection[str], *, limits_reasoning: bool = False
) -> ChatRequest:
    """The chat that is meant.

    Args:
        variables: Of the model's chat template, which may have a switch for thinking.
        limits_reasoning: Whether thinking can be given a budget here; else a budget is ignored.

    Raises:
        RequestError: A field is wrong, or asks for what is not served; it is named as Anthropic does.
    """
    fields: dict[str, Any] = {"model": body.model, "messages": _conversation(body)}
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if body.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.thinking is not None:
        on = body.thinking.type != "disabled"
        fields["chat_template_kwargs"] = {name: on for name in THINKING_SWITCHES if name in variables}
        if on and limits_reasoning:
            fields["thinking_token_budget"] = body.thinking.budget_tokens
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if body.output_config is not None and (form := body.output_config.format) is not None:
        schema = {"name": "output", "schema": form.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    with named_by_anthropic():
        return check_fields({name: value for name, value in fields.items() if value is not None}, ChatRequest)


@contextmanager
def named_by_anthropic() -> Iterator[None]:
    """A RequestError about a field of the chat names Anthropic's."""
    try:
        yield
    except RequestError as error:
        name = _NAMES.get(error.param or "")
        if name is None:
            raise
        raise RequestError(re.sub(rf"\b{error.param}\b", name, error.message), param=name) from None


def _conversation(body: CountTokensRequest) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": _text(body.system)}] if body.system else []
    turns = (_turn(message, f"messages[{i}]") for i, message in enumerate(body.messages))
    return [*system, *(message for turn in turns for message in turn)]


def _turn(message: Message, place: str) -> list[dict[str, Any]]:
    blocks: Sequence[Block] = message.content if isinstance(message.content, list) else ()
    if message.role == "assistant" and blocks:
        return [_answer(blocks, place)]
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    return _question(message.role, blocks, place)


def _answer(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append({"type": "text", "text": block.text})
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise RequestError(f"{place}.content[{i}]: results belong to the user's turns.", param=place)
            case RedactedThinkingBlock():
                pass
    answer: dict[str, Any] = {"role": "assistant", "content": texts or ("" if not calls else None)}
    if thoughts:
        answer["reasoning"] = "".join(thoughts)
    if calls:
        answer["tool_calls"] = calls
    return answer


def _question(role: str, blocks: Sequence[Block], place: str) -> list[dict[str, Any]]:
    """Results of calls are messages of their own; what stands between them is text."""
    messages: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        match block:
            case TextBlock():
                if not texts:
                    messages.append({"role": role, "content": texts})
                texts.append({"type": "text", "text": block.text})
            case ToolResultBlock() if role == "user":
                content = _text(block.content or "")
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
                texts = []
            case _:
                raise RequestError(f"{place}.content[{i}]: '{block.type}' is no block of role {role}.", param=place)
    return messages or [{"role": role, "content": ""}]


def _text(content: str | Sequence[TextBlock]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": block.text} for block in content]


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: AnthropicToolChoice) -> dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("tool_choice: a name belongs to type tool, and to no other.", param="tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type)}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields
