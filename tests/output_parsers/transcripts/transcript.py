"""A text that a model may write, what is in it, and every way to cut it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from quire.text.output_parsers.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    Tool,
    ToolCallDelta,
    ToolCallStart,
    merge_events,
)
from quire.text.output_parsers.formats import Turn
from quire.text.output_parsers.registry import create_parser


@dataclass(frozen=True)
class Call:
    """An expected call; `arguments` is exactly what the client gets, `id` a pattern for that of the format."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Transcript:
    """An output of a model that these parsers are for, and what must be made of it."""

    tool: str | None
    reasoning_parser: str | None
    name: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[Tool, ...] = ()
    turn: Turn = field(default_factory=Turn)


@dataclass(frozen=True)
class Parsed:
    """What a client has when it has joined all deltas."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def parse(pieces: Iterable[str], transcript: Transcript) -> list[OutputEvent]:
    """The merged events of a text that arrives in pieces."""
    if transcript.tool == "mistral":
        random.seed(0)  # for the ids that it invents
    parser = create_parser(transcript.tool, transcript.reasoning_parser, tools=transcript.tools, turn=transcript.turn)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merge_events([*events, *parser.finish()])


def joined(events: Sequence[OutputEvent]) -> Parsed:
    """What the events add up to; each call must have started before its arguments, with the next index."""
    content, reasoning, calls = "", "", list[Call]()
    for event in events:
        match event:
            case ContentDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case ToolCallStart(index, name, call_id):
                assert index == len(calls)
                calls.append(Call(name, "", call_id))
            case ToolCallDelta(index, arguments):
                assert index == len(calls) - 1
                calls[-1] = Call(calls[-1].name, calls[-1].arguments + arguments, calls[-1].id)
    return Parsed(content, reasoning, tuple(calls))


def check_whole(transcript: Transcript) -> None:
    """The whole text gives what is expected."""
    found = joined(parse([transcript.text], transcript))
    assert (found.content, found.reasoning) == (transcript.content, transcript.reasoning)
    assert [(call.name, call.arguments) for call in found.calls] == [
        (call.name, call.arguments) for call in transcript.calls
    ]
    for call, expected in zip(found.calls, transcript.calls, strict=True):
        assert re.fullmatch(expected.id or "", call.id or "")


def check_cuts(transcript: Transcript, splits: Iterable[list[str]]) -> None:
    """Each way to cut the text gives the same events as the whole."""
    whole = parse([transcript.text], transcript)
    for pieces in splits:
        assert parse(pieces, transcript) == whole, pieces


def every_cut(text: str) -> Iterator[list[str]]:
    """Every split into two pieces."""
    return (_cut(text, [at]) for at in range(1, len(text)))


def every_pair_of_cuts(text: str, most: int) -> Iterator[list[str]]:
    """Every split into three pieces of which the one in the middle has at most so many characters."""
    return (_cut(text, [at, at + length]) for length in range(1, most + 1) for at in range(1, len(text) - length))


def random_cuts(text: str, number: int) -> Iterator[list[str]]:
    """As many splits, into few or many pieces."""
    chance = random.Random(text)
    for _ in range(number):
        rate = chance.random()
        yield _cut(text, [at for at in range(1, len(text)) if chance.random() < rate])


def _cut(text: str, at: Sequence[int]) -> list[str]:
    return [text[begin:end] for begin, end in pairwise([0, *at, len(text)])]


def function(name: str, **properties: Any) -> Tool:
    """A tool whose parameters have these schemas, or, as a string, these types."""
    schemas = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in properties.items()}
    return Tool(name, {"type": "object", "properties": schemas})
