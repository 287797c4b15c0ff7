"""Anthropic's conversations as ChatRequests.

Owns what each field means as a chat, and how errors about it are said. Knows nothing about responses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from quire.errors import ContextLengthError, UnsupportedField
from quire.serving.api.request_body import check_fields
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.field_names import fields_named
from quire.serving.dialects.anthropic.content_blocks import chat_messages
from quire.serving.dialects.anthropic.schemas import ContextManagement, CountTokensRequest, CustomTool, MessagesRequest
from quire.serving.dialects.anthropic.tools import chat_tool_choice, chat_tools
from quire.text.hints import NOT_READ, THINKING_SWITCHES, HintLog

_NAMES = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Fields of a ChatRequest by their names in Anthropic's body, where these differ."""


def chat_request(body: CountTokensRequest, variables: Collection[str]) -> ChatRequest:
    """The chat that is meant.

    Args:
        variables: Of the model's chat template, which may have a switch for thinking.

    Raises:
        RequestError: A field is wrong, or asks for what is not served; it is named as Anthropic does.
    """
    _check_edits(body.context_management)
    fields: dict[str, Any] = {"model": body.model, "messages": chat_messages(body.system, body.messages)}
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
        fields["tools"] = chat_tools(body.tools) or None
    if body.tool_choice is not None:
        fields |= chat_tool_choice(body.tool_choice, body.tools or ())
    if body.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.thinking is not None:
        on = body.thinking.type != "disabled"
        fields["chat_template_kwargs"] = {name: on for name in THINKING_SWITCHES if name in variables}
        if on:
            fields["thinking_token_budget"] = body.thinking.budget_tokens
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    form = body.output_format if body.output_config is None else body.output_config.format or body.output_format
    if form is not None:
        schema = {"name": "output", "schema": form.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    with named_by_anthropic():
        return check_fields({name: value for name, value in fields.items() if value is not None}, ChatRequest)


def log_hints(body: CountTokensRequest, hints: HintLog, variables: Collection[str]) -> None:
    """Take note of the hints that the model cannot follow.

    Args:
        variables: Of its chat template.
    """
    switches = [name for name in THINKING_SWITCHES if name in variables]
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled") and not switches:
        hints.drop(f"thinking.type {body.thinking.type}", NOT_READ)
    if body.speed not in (None, "standard"):
        hints.drop("speed", "there is one speed")
    if body.fallbacks:
        hints.drop("fallbacks", "no request is declined")
    if body.output_config is not None and body.output_config.task_budget is not None:
        hints.drop("output_config.task_budget", "the model is not told of it")
    if body.thinking is not None and body.thinking.type == "between_tools":
        hints.drop("thinking.type between_tools", "a model thinks in front of each answer, or not at all")
    if body.context_management is not None and body.context_management.edits:
        hints.drop("context_management", "a conversation is read as a whole, as long as it fits")
    if any(isinstance(tool, CustomTool) and tool.defer_loading for tool in body.tools or ()):
        hints.drop("tools.defer_loading", "the model is shown all tools at once")


@contextmanager
def named_by_anthropic() -> Iterator[None]:
    """A RequestError about a field of the chat names Anthropic's. One about the context has the words by which
    Anthropic's clients know what to do: ask for less, or make the conversation shorter."""
    try:
        with fields_named(_NAMES):
            yield
    except ContextLengthError as error:
        error.message = _context_error(error)
        raise


def _context_error(error: ContextLengthError) -> str:
    if error.asked is None:
        most = min(error.longest, error.prompt_tokens - 1)  # an answer needs room
        return f"prompt is too long: {error.prompt_tokens} tokens > {most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + {error.asked} > "
        f"{error.longest}, decrease input length or `max_tokens` and try again"
    )


def _check_edits(management: ContextManagement | None) -> None:
    """Clearing makes room, which can be left undone; a summary is an answer of its own."""
    edits = (management.edits if management else None) or ()
    for i, edit in enumerate(edits):
        if not edit.type.startswith("clear_"):
            raise UnsupportedField(
                f"context_management.edits[{i}].type", f"'{edit.type[:64]}' is none of clear_tool_uses, clear_thinking"
            )
