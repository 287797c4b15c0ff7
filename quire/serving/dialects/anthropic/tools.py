"""Anthropic's tools and choices among them as those of a chat.

Owns which tools Anthropic runs itself: they are left out, since a model is merely not told of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from quire.errors import RequestError, UnsupportedField
from quire.serving.dialects.anthropic.schemas import (
    AnthropicTool,
    AnthropicToolChoice,
    CountTokensRequest,
    CustomTool,
    TypedTool,
)

_HOSTED = re.compile(
    r"(web_search|web_fetch|code_execution|advisor|tool_search_tool(?:_bm25|_regex)?|mcp_toolset)(?:_[0-9]{8})?"
)
_RUN_BY_CLIENT = re.compile(r"(bash|text_editor|memory|computer|computer_toolset|browser_toolset)(?:_[0-9]{8})?")


def hosted_tools(body: CountTokensRequest) -> list[str]:
    """Types of the tools that Anthropic runs, which are left out here."""
    hosted = [tool.type for tool in body.tools or () if _is_hosted(tool) and tool.type]
    return [*hosted, "mcp_servers"] if body.mcp_servers else hosted


def chat_tools(tools: Sequence[AnthropicTool]) -> list[dict[str, Any]]:
    """The functions among the tools.

    Raises:
        RequestError: A tool is neither a function nor run by Anthropic.
    """
    return [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools) if not _is_hosted(tool)]


def chat_tool_choice(choice: AnthropicToolChoice, tools: Sequence[AnthropicTool]) -> dict[str, Any]:
    """The fields of a chat that say which of the tools must be called.

    Raises:
        RequestError: The choice does not fit its name, or the tools.
    """
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
        if _RUN_BY_CLIENT.fullmatch(tool.type):
            raise UnsupportedField(
                f"{place}.type",
                f"only Anthropic's models know '{tool.type}'; describe it as a tool of type custom, with name, "
                "description and input_schema",
            )
        raise RequestError(f"{place}.type must be 'custom', not '{tool.type[:64]}'.", param=f"{place}.type")
    assert isinstance(tool, CustomTool)
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise UnsupportedField(f"{place}.allowed_callers", "no code is executed here: add 'direct'")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
