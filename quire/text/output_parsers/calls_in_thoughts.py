"""Calls within the reasoning of a model that says nothing behind it: without them the turn would be lost.

Some models write a call before they have ended their reasoning, and then end the turn. What they only consider is no
call: any answer behind the reasoning shows that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.text.output_parsers.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    Tool,
    ToolCallDelta,
    ToolCallStart,
)
from quire.text.output_parsers.formats import ToolFormat
from quire.text.output_parsers.scanner import OutputParser, Steps, TextScanner
from quire.text.output_parsers.tool_calls import Answer


class Thoughts:
    """What a choice has reasoned, and whether it has said anything else."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._answered = False

    def watch(self, steps: Steps[None]) -> Steps[None]:
        """Pass events on, and note what they say."""
        for event in steps:
            match event:
                case ReasoningDelta(text):
                    self._pieces.append(text)
                case ContentDelta(text):
                    self._answered = self._answered or bool(text.strip())
                case ToolCallStart():
                    self._answered = True
            yield event

    def calls(self, tool: ToolFormat, tools: Sequence[Tool]) -> Iterator[OutputEvent]:
        """The calls in the reasoning of a choice that has said nothing else; what is announced as a call and is none
        becomes content."""
        thought = "" if self._answered else "".join(self._pieces)
        begins = [at for tag in tool.special_tokens if (at := thought.find(tag)) >= 0]
        if not begins:
            return

        def read(scanner: TextScanner) -> Steps[None]:
            answer = Answer(tool.new_id)
            yield from tool.read(scanner, answer, tools)
            yield from answer.finish()

        parser, announced = OutputParser(read), thought[min(begins) :]
        events = parser.feed(announced) + parser.finish()
        calls: list[OutputEvent] = [each for each in events if isinstance(each, ToolCallStart | ToolCallDelta)]
        yield from calls or [ContentDelta(announced)]
