"""A whole choice as the message that a model wrote: content, reasoning, tool calls.

Owns adding up output events. Knows no JSON of any endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.text.output_parsers.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)


@dataclass(frozen=True)
class ToolCall:
    """One call of a function.

    Attributes:
        arguments: JSON text, as the model wrote it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class AssistantMessage:
    """What a choice says."""

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
    calls = (ToolCall(start.id or "", start.name, "".join(arguments[start.index])) for start in starts)
    return AssistantMessage("".join(content), "".join(reasoning), tuple(calls))
