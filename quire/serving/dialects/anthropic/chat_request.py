"""Anthropic's conversations as ChatRequests: what each field means as a chat, and how errors about it are said.

Tools that Anthropic runs itself are left out, since a model is merely not told of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from quire.errors import ContextLengthError, RequestError, UnsupportedField
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.known_fields import FieldNames
from quire.serving.dialects.anthropic.messages import chat_messages
from quire.serving.dialects.anthropic.schemas import (
    AnthropicTool,
    AnthropicToolChoice,
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    TypedTool,
)
from quire.serving.dialects.anthropic.typed_tools import typed_function
from quire.serving.dialects.dialect import json_format, make_chat, thinking_switches
from quire.text.hints import NOT_READ, HintLog

_PASSED_ON = ("max_tokens", "stream", "temperature", "top_p", "top_k")
_HOSTED = re.compile(
    r"(web_search|web_fetch|code_execution|advisor|tool_search_tool(?:_bm25|_regex)?|mcp_toolset)(?:_[0-9]{8})?"
)
_MARKED_MESSAGES = 4
"""Last messages in which a client marks what is to be cached."""
_TTL, _LONG_TTL = "5m", "1h"
"""Anthropic's times, by default and if asked for."""
_OF_SEEING_MODELS = re.compile(r"(computer|computer_toolset|browser_toolset)(?:_[0-9]{8})?")


def chat_request(body: CountTokensRequest, variables: Collection[str], *, sees: bool = False) -> ChatRequest:
    """The chat that is meant, for a model that `sees` images or does not; raises a RequestError that names fields as
    Anthropic does. `variables` are the template's."""
    _check_edits(body)
    fields: dict[str, Any] = {"model": body.model, "messages": chat_messages(body.system, body.messages, sees=sees)}
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in _PASSED_ON}
        fields["stop"] = body.stop_sequences
    if body.tools:
        fields["tools"] = chat_tools(body.tools) or None
    if body.tool_choice is not None:
        fields |= chat_tool_choice(body.tool_choice, body.tools or ())
    if body.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.thinking is not None:
        on = body.thinking.type != "disabled"
        fields["chat_template_kwargs"] = thinking_switches(on, variables)
        fields["thinking_token_budget"] = body.thinking.budget_tokens if on else None
    if (ttl := _cache_ttl(body)) is not None:
        fields["prompt_cache_options"] = {"ttl": ttl}
    form = body.output_format
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
        form = body.output_config.format or form
    if form is not None:
        fields["response_format"] = json_format("output", form.schema_, strict=True)
    return make_chat(fields, NAMES)


def log_hints(body: CountTokensRequest, hints: HintLog, variables: Collection[str]) -> None:
    """Log the hints that a model whose chat template has these variables cannot follow."""
    thinking = None if body.thinking is None else body.thinking.type
    if thinking in ("enabled", "disabled") and not thinking_switches(True, variables):
        hints.drop(f"thinking.type {thinking}", NOT_READ)
    if body.speed not in (None, "standard"):
        hints.drop("speed", "there is one speed")
    if body.fallbacks:
        hints.drop("fallbacks", "no request is declined")
    if body.output_config is not None and body.output_config.task_budget is not None:
        hints.drop("output_config.task_budget", "the model is not told of it")
    if thinking == "between_tools":
        hints.drop("thinking.type between_tools", "a model thinks in front of each answer, or not at all")
    if body.context_management is not None and body.context_management.edits:
        hints.drop("context_management", "a conversation is read as a whole, as long as it fits")
    if any(isinstance(tool, CustomTool) and tool.defer_loading for tool in body.tools or ()):
        hints.drop("tools.defer_loading", "the model is shown all tools at once")


def _context_error(error: ContextLengthError) -> str:
    """The words by which Anthropic's clients know what to do: ask for less, or make the conversation shorter."""
    if error.asked is None:
        most = min(error.longest, error.prompt_tokens - 1)  # an answer needs room
        return f"prompt is too long: {error.prompt_tokens} tokens > {most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + {error.asked} > "
        f"{error.longest}, decrease input length or `max_tokens` and try again"
    )


def _cache_ttl(body: CountTokensRequest) -> str | None:
    """For how long the longest mark of `cache_control` wants the prefix to be cached; None without a mark. Marks stand
    at the end of what is to be cached, so only the last messages are looked through."""
    marked: list[Any] = [*(body.tools or ()), *(body.system if isinstance(body.system, list) else ())]
    for message in body.messages[-_MARKED_MESSAGES:]:
        marked += message.content if isinstance(message.content, list) else ()
    marks = [mark for each in marked if isinstance(mark := getattr(each, "cache_control", None), dict)]
    return max((_ttl(mark) for mark in marks), key=lambda ttl: ttl == _LONG_TTL, default=None)


def _ttl(mark: dict[str, Any]) -> str:
    ttl = mark.get("ttl")
    return ttl if isinstance(ttl, str) else _TTL


NAMES = FieldNames(
    {
        "prompt_cache_options.ttl": "cache_control.ttl",
        "stop": "stop_sequences",
        "prompt": "messages",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
        "response_format": "output_config.format",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    },
    context_error=_context_error,
)
"""Fields of a ChatRequest by their names in Anthropic's body, where these differ."""


def _check_edits(body: CountTokensRequest) -> None:
    """Refuse edits other than clearing, which makes room and can be left undone; a summary is an answer of its own."""
    edits = (body.context_management.edits if body.context_management else None) or ()
    for i, edit in enumerate(edits):
        if not edit.type.startswith("clear_"):
            raise UnsupportedField(
                f"context_management.edits[{i}].type", f"'{edit.type[:64]}' is none of clear_tool_uses, clear_thinking"
            )


def hosted_tools(body: CountTokensRequest) -> list[str]:
    """Types of the tools that Anthropic runs, which are left out here."""
    hosted = [tool.type for tool in body.tools or () if _is_hosted(tool) and tool.type]
    return [*hosted, "mcp_servers"] if body.mcp_servers else hosted


def chat_tools(tools: Sequence[AnthropicTool]) -> list[dict[str, Any]]:
    """The functions among the tools; raises RequestError if a tool is neither a function nor run by Anthropic."""
    return [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools) if not _is_hosted(tool)]


def chat_tool_choice(choice: AnthropicToolChoice, tools: Sequence[AnthropicTool]) -> dict[str, Any]:
    """The fields of a chat that say which tool must be called; raises RequestError if the choice does not fit."""
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("tool_choice: a name belongs to type tool, and to no other.", param="tool_choice")
    hosted = [tool.name or str(tool.type) for tool in tools if _is_hosted(tool)]
    if hosted and (choice.name in hosted or (choice.type == "any" and len(hosted) == len(tools))):
        raise RequestError(
            f"tool_choice: '{(choice.name or hosted[0])[:64]}' is a tool that Anthropic runs, and is not served here: "
            "choose among tools of your own.",
            param="tool_choice",
        )
    if len(hosted) == len(tools) and choice.type in ("auto", "none"):
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type)}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _is_hosted(tool: AnthropicTool) -> bool:
    return isinstance(tool, TypedTool) and _HOSTED.fullmatch(tool.type) is not None


def _function(tool: AnthropicTool, place: str) -> dict[str, Any]:
    if isinstance(tool, TypedTool):
        return _typed_function(tool, place)
    assert isinstance(tool, CustomTool)
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise UnsupportedField(f"{place}.allowed_callers", "no code is executed here: add 'direct'")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _typed_function(tool: TypedTool, place: str) -> dict[str, Any]:
    known = typed_function(tool.type)
    if known is None and _OF_SEEING_MODELS.fullmatch(tool.type):
        raise UnsupportedField(
            f"{place}.type",
            f"'{tool.type}' is for models that see the screen; describe what others can use as a tool of type custom, "
            "with name, description and input_schema",
        )
    if known is None:
        raise RequestError(f"{place}.type must be 'custom', not '{tool.type[:64]}'.", param=f"{place}.type")
    if tool.name is None:
        raise RequestError(f"{place}.name is required.", param=f"{place}.name")
    return {"type": "function", "function": {"name": tool.name, **known, "strict": tool.strict or False}}
