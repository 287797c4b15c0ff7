"""What a choice's text says: content, reasoning and tool calls, by the parsers that fit the model.

Owns the ids of calls, how many of them a request wants, and the finish reason that follows. Knows no format.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.text.deltas import ChoiceDelta
from quire.text.output_parsers.events import OutputEvent, ToolCallDelta, ToolCallStart
from quire.text.output_parsers.scanner import OutputParser


def new_call_id() -> str:
    """An id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class OutputParsing:
    """How the choices of a request are parsed.

    Attributes:
        make_parser: One for each choice.
        shown_tokens: Special tokens that the parser reads, whatever `skip_special_tokens` says.
        one_call: Whether a choice ends behind its first call (`parallel_tool_calls` is false).
        make_call_id: For calls that the format gives no id.
    """

    make_parser: Callable[[], OutputParser]
    shown_tokens: frozenset[int] = frozenset()
    one_call: bool = False
    make_call_id: Callable[[], str] = new_call_id


class ChoiceParser:
    """Parses one choice while it is generated."""

    def __init__(self, parsing: OutputParsing) -> None:
        self._parsing = parsing
        self._parser = parsing.make_parser()
        self._called = False

    def parse(self, gained: ChoiceDelta) -> None:
        """Set the events of what was gained, and `tool_calls` for a choice that stopped behind a call."""
        events = self._parser.feed(gained.text) if gained.text else []
        if gained.finish_reason is not None:
            events += self._parser.finish()
        gained.events = []
        for event in events:
            if self._parsing.one_call and isinstance(event, ToolCallStart | ToolCallDelta) and event.index > 0:
                gained.finish_reason, gained.stop_reason = "stop", None
                break
            gained.events.append(self._identified(event))
        if gained.finish_reason == "stop" and self._called:
            gained.finish_reason = "tool_calls"

    def _identified(self, event: OutputEvent) -> OutputEvent:
        if not isinstance(event, ToolCallStart):
            return event
        self._called = True
        return replace(event, id=event.id or self._parsing.make_call_id())
