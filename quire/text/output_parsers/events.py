"""What an output parser says about a model's text. Knows nothing about formats, HTTP, engines or tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins; its arguments follow.

    Attributes:
        index: The number of the call in its choice, from 0.
        id: The format's own name of the call; None where it has none, and the caller makes one.
        custom: Whether it calls a custom tool, whose input is text.
    """

    index: int
    name: str
    id: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call's arguments, as JSON text. All deltas of a call together are one JSON object, unless the
    model's text was cut off or broken within them. Of a `custom` tool, the one delta is the input."""

    index: int
    arguments: str
    custom: bool = False


OutputEvent: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallDelta


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: A JSON schema.
        strict: Whether arguments must match it.
        input_grammar: A grammar in Lark that the one argument, `input`, must match; empty for none.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    input_grammar: str = ""


def merge_events(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Join deltas that follow each other, and leave all other events as they are."""
    merged: list[OutputEvent] = []
    run: list[OutputEvent] = []
    for event in events:
        if run and not _continues(run[-1], event):
            merged.append(_joined(run))
            run = []
        run.append(event)
    if run:
        merged.append(_joined(run))
    return merged


def _continues(event: OutputEvent, later: OutputEvent) -> bool:
    if isinstance(event, ToolCallDelta) and isinstance(later, ToolCallDelta):
        return event.index == later.index
    return type(event) is type(later) and not isinstance(event, ToolCallStart)


def _joined(run: list[OutputEvent]) -> OutputEvent:
    match run[0]:
        case ContentDelta():
            return ContentDelta("".join(event.text for event in run if isinstance(event, ContentDelta)))
        case ReasoningDelta():
            return ReasoningDelta("".join(event.text for event in run if isinstance(event, ReasoningDelta)))
        case ToolCallDelta(index):
            pieces = [event.arguments for event in run if isinstance(event, ToolCallDelta)]
            return ToolCallDelta(index, "".join(pieces), run[0].custom)
        case start:
            return start
