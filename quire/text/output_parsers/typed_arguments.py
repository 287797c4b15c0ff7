"""Writing a call's arguments as a JSON object from keys and texts.

Owns the braces, commas and quotes, and that strings stream while other values wait for their end. Knows no tags but
those it is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from quire.text.output_parsers.argument_types import ArgumentTypes
from quire.text.output_parsers.events import OutputEvent
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.tool_calls import ToolCalls


class TypedArguments:
    """The arguments of one call, which has started."""

    def __init__(self, scanner: TextScanner, calls: ToolCalls, types: ArgumentTypes) -> None:
        self._scanner = scanner
        self._calls = calls
        self._types = types
        self._separator = "{"

    def read(self, key: str, ends: Tags, *, string: bool | None = None) -> Steps[str | None]:
        """Read a value up to one of the tags, which is returned and stays unread; None if the text ends before. One
        newline at each side belongs to the tags.

        Args:
            key: The argument's name.
            ends: Tags that end the value.
            string: Whether it is a string, where the format says so.
        """
        yield from self._calls.arguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._separator = ", "
        if (yield from self._scanner.peek()) == "\n":
            self._scanner.take()
        if string or (string is None and self._types.is_string(key)):
            return (yield from self._read_string(ends))
        text, tag = yield from self._scanner.text_until(ends, consume=False)
        if tag is None:
            yield from self._calls.arguments(text)
        else:
            yield from self._calls.arguments(self._types.json_of(key, text.removesuffix("\n")))
        return tag

    def close(self) -> Iterator[OutputEvent]:
        """No more arguments follow."""
        yield from self._calls.arguments("{}" if self._separator == "{" else "}")

    def _read_string(self, ends: Tags) -> Steps[str | None]:
        yield from self._calls.arguments('"')
        newline = False

        def emit(piece: str) -> Iterator[OutputEvent]:
            nonlocal newline
            text = "\n" + piece if newline else piece
            newline = text.endswith("\n")
            if text := text.removesuffix("\n"):
                yield from self._calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

        tag = yield from self._scanner.until(ends, emit, consume=False)
        if tag is not None:
            yield from self._calls.arguments('"')
        return tag
