"""A request of /v1/responses as one of /v1/chat/completions.

Owns which field becomes which, and that an error names the field that was sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quire.api.request_body import check_fields
from quire.api.schemas.chat import ChatRequest
from quire.api.schemas.responses import SAMPLING, ResponsesRequest, TextFormat
from quire.errors import RequestError, UnsupportedField

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_RENAMED = (
    (re.compile(r"^(messages\b.*|prompt)$"), "input"),
    (re.compile(r"^(max_completion_tokens|max_tokens)$"), "max_output_tokens"),
    (re.compile(r"^response_format\b(\.json_schema)?"), "text.format"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^(tool_choice)\.function\b"), r"\1"),
)


def chat_request(fields: ResponsesRequest, messages: Sequence[dict[str, Any]]) -> ChatRequest:
    """The chat request that answers it.

    Args:
        messages: The conversation.

    Raises:
        RequestError: A field is wrong or not served.
    """
    tools, choice = chosen_tools(fields)
    body: dict[str, Any] = {name: getattr(fields, name) for name in SAMPLING}
    body |= {
        "model": fields.model,
        "messages": list(messages),
        "max_completion_tokens": fields.max_output_tokens,
        "tools": [_chat_tool(tool) for tool in tools] or None,
        "tool_choice": choice if tools or choice not in ("none", "auto") else None,
        "parallel_tool_calls": fields.parallel_tool_calls if tools else None,
        "response_format": _response_format(fields.text.format if fields.text else None),
        "reasoning_effort": fields.reasoning.effort if fields.reasoning else None,
    }
    if fields.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    with named_as_sent():
        return check_fields({name: value for name, value in body.items() if value is not None}, ChatRequest)


@contextmanager
def named_as_sent() -> Iterator[None]:
    """An error about a field of chat requests names the one of /v1/responses."""
    try:
        yield
    except RequestError as error:
        for pattern, name in _RENAMED:
            if error.param and pattern.match(error.param):
                sent = pattern.sub(name, error.param)
                error.message = error.message.replace(error.param, sent)
                error.param = sent
                break
        raise


def chosen_tools(fields: ResponsesRequest) -> tuple[list[dict[str, Any]], Any]:
    """The tools that may be called, and how chat requests say which must be.

    Raises:
        UnsupportedField: One is no function.
        RequestError: A choice that does not fit the tools.
    """
    tools, choice = fields.tools or [], fields.tool_choice
    for at, tool in enumerate(tools):
        _check_function(tool, f"tools[{at}]")
    if isinstance(choice, str) or choice is None:
        if choice not in (None, "none", "auto", "required"):
            raise RequestError("tool_choice must be none, auto, required or a function.", param="tool_choice")
        return tools, choice
    match choice.get("type"):
        case "function" if isinstance(choice.get("name"), str):
            return tools, {"type": "function", "function": {"name": choice["name"]}}
        case "allowed_tools" if isinstance(choice.get("tools"), list):
            names = {tool.get("name") for tool in choice["tools"] if isinstance(tool, dict)}
            allowed = [tool for tool in tools if tool.get("name") in names]
            if len(allowed) != len(names):
                raise RequestError("tool_choice allows a tool that is none of tools.", param="tool_choice")
            return allowed, "required" if choice.get("mode") == "required" else "auto"
    raise UnsupportedField("tool_choice.type", "choose among functions")


def _check_function(tool: dict[str, Any], place: str) -> None:
    kind = tool.get("type")
    if kind != "function":
        raise UnsupportedField(f"{place}.type", f"only functions are served; '{str(kind)[:64]}' is none")
    for name, value in tool.items():
        if name not in ("type", *_FUNCTION_FIELDS) and value not in (None, False, ["direct"]):
            raise UnsupportedField(f"{place}.{name[:64]}")


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.json_schema is None:
        raise RequestError("text.format.schema is required.", param="text.format.schema")
    values = {"schema": form.json_schema, "description": form.description, "strict": form.strict}
    schema = {name: value for name, value in values.items() if value is not None}
    return {"type": "json_schema", "json_schema": {"name": form.name or "answer", **schema}}
