"""Checks finished outputs against schemas that their grammar does not enforce in full, beside the event loop."""

from __future__ import annotations

from quire.engine.structured_output.messages import FinishedValue
from quire.errors import SchemaMismatchError
from quire.serving.api.grammar_checks import GrammarChecks
from quire.serving.api.session.output_collector import OutputCollector
from quire.text.deltas import ChoiceDelta
from quire.text.output_parsers.events import ContentDelta, OutputEvent, ToolCallDelta, ToolCallStart, merge_events


class FinishedValues:
    """The outputs of one request's choices. The end of a choice waits until its output is checked."""

    def __init__(self, grammars: GrammarChecks, collector: OutputCollector) -> None:
        self._grammars = grammars
        self._schemas = {each.tool: each.schema for each in collector.lenient}
        self._form = collector.form or ""
        self._events: list[list[OutputEvent]] = [[] for _ in collector.adds]
        self._unchecked: list[int] = []
        self._ends: dict[int, ChoiceDelta] = {}

    @property
    def waiting(self) -> bool:
        """Whether a choice has ended and is not checked yet."""
        return bool(self._unchecked)

    def holds_end(self, index: int, gained: ChoiceDelta) -> bool:
        """Record what a choice gained. Returns whether its end, which is taken out of that, waits to be checked; what
        was cut off is not checked."""
        self._events[index] += gained.output
        if gained.finish_reason not in ("stop", "tool_calls") or gained.stop_reason is not None:
            return False
        self._ends[index] = ChoiceDelta(finish_reason=gained.finish_reason)
        self._unchecked.append(index)
        gained.finish_reason = None
        return True

    def take_end(self, index: int) -> ChoiceDelta | None:
        """The end of a choice that was checked; None if it is none, or was taken before."""
        return self._ends.pop(index, None)

    @property
    def next(self) -> int:
        """The next choice that waits."""
        return self._unchecked[0]

    async def check(self, index: int) -> None:
        """Check the output of a choice that waits. Raises SchemaMismatchError if it is not valid, and UnavailableError
        if it cannot be checked now."""
        self._unchecked.remove(index)
        for value, what in self._values(index):
            if problem := await self._grammars.problem(value):
                raise SchemaMismatchError(
                    f"{self._form}: {what} is not valid under its schema, which cannot be enforced in full: {problem}. "
                    "Send the request again, or change the schema: with 'strict' it is enforced in full or refused.",
                    param=self._form or None,
                )

    def _values(self, index: int) -> list[tuple[FinishedValue, str]]:
        """What is to be checked of a choice's output, and what to call it."""
        values, calls = [], dict[int, str]()
        content = ""
        for event in merge_events(self._events[index]):
            match event:
                case ContentDelta(text):
                    content += text
                case ToolCallStart(number, name):
                    calls[number] = name
                case ToolCallDelta(number, arguments) if calls[number] in self._schemas:
                    name = calls[number]
                    values.append((FinishedValue(self._schemas[name], arguments), f"the call of {name!r}"))
        if "" in self._schemas and (content.strip() or not calls):
            values.append((FinishedValue(self._schemas[""], content), "the output"))
        return values
