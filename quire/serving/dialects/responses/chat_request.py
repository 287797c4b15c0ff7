"""A request of /v1/responses as one of /v1/chat/completions.

Owns which field becomes which, and that an error names the field that was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.errors import RequestError
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.known_fields import FieldNames
from quire.serving.dialects.dialect import json_format, make_chat
from quire.serving.dialects.responses.schemas import SAMPLING, ReasoningConfig, ResponsesRequest, TextFormat
from quire.serving.dialects.responses.tools import ResponseTools
from quire.text.hints import HintLog


def chat_request(fields: ResponsesRequest, messages: Sequence[dict[str, Any]], tools: ResponseTools) -> ChatRequest:
    """The chat request that answers it.

    Args:
        messages: The conversation.
        tools: Of the request.

    Raises:
        RequestError: A field is wrong or not served.
    """
    body: dict[str, Any] = {name: getattr(fields, name) for name in SAMPLING}
    body |= {
        "model": fields.model,
        "messages": list(messages),
        "max_completion_tokens": fields.max_output_tokens,
        "tools": tools.chat_tools or None,
        "tool_choice": tools.choice if tools.allowed or tools.choice not in ("none", "auto") else None,
        "parallel_tool_calls": fields.parallel_tool_calls if tools.allowed else None,
        "response_format": _response_format(fields.text.format if fields.text else None),
        "reasoning_effort": fields.reasoning.effort if fields.reasoning else None,
        "verbosity": fields.text.verbosity if fields.text else None,
    }
    if fields.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    return make_chat(body, _names(tools))


def _names(tools: ResponseTools) -> FieldNames:
    """Fields of chat requests by their names in /v1/responses, where these differ."""
    return FieldNames({
        "messages": lambda _: "input",
        "prompt": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "reasoning_effort": "reasoning.effort",
        "tool_choice.function": "tool_choice",
        "tools": tools.sent_place,
    })  # fmt: skip


def log_hints(fields: ResponsesRequest, hints: HintLog) -> None:
    """Take note of the hints that no model here can follow."""
    reasoning = fields.reasoning or ReasoningConfig()
    if {reasoning.summary, reasoning.generate_summary} & {"concise", "detailed"}:
        hints.drop("reasoning.summary", "reasoning is shown as it is, and not summarized")
    if reasoning.mode not in (None, "standard"):
        hints.drop("reasoning.mode", "a model has one")
    if reasoning.context not in (None, "auto", "all_turns"):
        hints.drop("reasoning.context", "the chat template chooses which reasoning is shown again")


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.json_schema is None:
        raise RequestError("text.format.schema is required.", param="text.format.schema")
    options = {"description": form.description, "strict": form.strict}
    given = {name: value for name, value in options.items() if value is not None}
    return json_format(form.name or "answer", form.json_schema, **given)
