"""A text that a model may write, what is in it, and every way to cut it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from quire.output_parsers.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    Tool,
    ToolCallDelta,
    ToolCallStart,
    merge_events,
)
from quire.output_parsers.formats import Turn
from quire.output_parsers.registry import create_parser

RANDOM_CUTS = 1_000


@dataclass(frozen=True)
class Call:
    """An expected call; `arguments` is exactly what the client gets."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Transcript:
    """An output and what must be made of it."""

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


def parse(pieces: Iterable[str], transcript: Transcript, tool: str | None, reasoning: str | None) -> list[OutputEvent]:
    """The merged events of a text that arrives in pieces."""
    parser = create_parser(tool, reasoning, tools=transcript.tools, turn=transcript.turn)
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


def cuts(text: str) -> Iterator[list[str]]:
    """Every split into two and three pieces, character by character, and RANDOM_CUTS random ones."""
    for number in (1, 2):
        for at in combinations(range(1, len(text)), number):
            yield _cut(text, at)
    yield list(text)
    chance = random.Random(text)
    for _ in range(RANDOM_CUTS):
        rate = chance.random()
        yield _cut(text, [at for at in range(1, len(text)) if chance.random() < rate])


def _cut(text: str, at: Sequence[int]) -> list[str]:
    return [text[begin:end] for begin, end in pairwise([0, *at, len(text)])]


def check(transcript: Transcript, tool: str | None, reasoning: str | None) -> None:
    """The whole text gives what is expected, and so does each way to cut it, event by event."""
    whole = parse([transcript.text], transcript, tool, reasoning)
    assert joined(whole) == Parsed(transcript.content, transcript.reasoning, transcript.calls)
    for pieces in cuts(transcript.text):
        assert parse(pieces, transcript, tool, reasoning) == whole, pieces
