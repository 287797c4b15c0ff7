"""Anthropic's conversations as ChatRequests.

Owns what each field means as a chat, and how errors about it are said. Knows nothing about answers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from quire.errors import ContextLengthError, UnsupportedField
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.known_fields import FieldNames
from quire.serving.dialects.anthropic.messages import chat_messages
from quire.serving.dialects.anthropic.schemas import CountTokensRequest, CustomTool, MessagesRequest
from quire.serving.dialects.anthropic.tools import chat_tool_choice, chat_tools
from quire.serving.dialects.dialect import json_format, make_chat, thinking_switches
from quire.text.hints import NOT_READ, HintLog

_PASSED_ON = ("max_tokens", "stream", "temperature", "top_p", "top_k")


def chat_request(body: CountTokensRequest, variables: Collection[str]) -> ChatRequest:
    """The chat that is meant.

    Args:
        variables: Of the model's chat template, which may have a switch for thinking.

    Raises:
        RequestError: A field is wrong, or asks for what is not served; it is named as Anthropic does.
    """
    _check_edits(body)
    fields: dict[str, Any] = {"model": body.model, "messages": chat_messages(body.system, body.messages)}
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
    form = body.output_format
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
        form = body.output_config.format or form
    if form is not None:
        fields["response_format"] = json_format("output", form.schema_, strict=True)
    return make_chat(fields, NAMES)


def log_hints(body: CountTokensRequest, hints: HintLog, variables: Collection[str]) -> None:
    """Take note of the hints that the model cannot follow.

    Args:
        variables: Of its chat template.
    """
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


NAMES = FieldNames(
    {
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
    """Clearing makes room, which can be left undone; a summary is an answer of its own."""
    edits = (body.context_management.edits if body.context_management else None) or ()
    for i, edit in enumerate(edits):
        if not edit.type.startswith("clear_"):
            raise UnsupportedField(
                f"context_management.edits[{i}].type", f"'{edit.type[:64]}' is none of clear_tool_uses, clear_thinking"
            )
