"""Gemma's calls: a name, and arguments in braces whose keys are bare words and whose strings stand between tags.

Each call comes out when it is complete, because only then its values are known. A grammar would have to enforce what is
no JSON, so these calls cannot be enforced yet.

Sources: the chat templates and model cards of google/functiongemma-270m-it and google/gemma-4-E4B-it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.formats import ToolFormat
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.tool_calls import Answer

MAX_DEPTH = 32
_HEADER = re.compile(r"call:\s*([\w.\-]+)\s*")
_WORDS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class GemmaCalls:
    """Reads answers whose calls stand between `begin` and `end`, and strings between two `quote`."""

    def __init__(self, begin: str, end: str, quote: str) -> None:
        self._begin_text = begin
        self._begin, self._end, self._quote = Tags(begin), Tags(end), Tags(quote)
        self._header_end = Tags("{", "\n", begin, end)
        self._key_end = Tags(":", ",", "{", "}", "[", "]", "\n", begin, end)

    def read(self, scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
        while (yield from scanner.until(self._begin, answer.text)):
            scanner.start_recording(self._begin_text)
            call = yield from self._call(scanner)
            recorded = scanner.recorded()
            if call is None:
                yield from answer.text(recorded)
                continue
            yield from answer.whole(*call)
            scanner.start_recording()
            yield from scanner.skip_space()
            tag = yield from scanner.skip_tag(self._end)
            skipped = scanner.recorded()
            yield from answer.text("" if tag else skipped)

    def _call(self, scanner: TextScanner) -> Steps[tuple[str, str] | None]:
        """The name and the arguments, as JSON, of the call that begins here."""
        yield from scanner.skip_space()
        text, tag = yield from scanner.text_until(self._header_end, consume=False)
        header = _HEADER.fullmatch(text)
        if header is None or tag != "{":
            return None
        arguments = yield from self._value(scanner, 0)
        return None if arguments is None else (header[1], arguments)

    def _value(self, scanner: TextScanner, depth: int) -> Steps[str | None]:
        """The value that begins here, as JSON; None if it is broken."""
        first = yield from scanner.skip_space()
        if depth > MAX_DEPTH:
            return None
        if first in ("{", "["):
            return (yield from self._container(scanner, first, depth))
        if first == '"':
            return _checked((yield from scanner.json_string()))
        if first == "<":
            return (yield from self._string(scanner))
        word = yield from scanner.json_word()
        return word if word in _WORDS or _NUMBER.fullmatch(word) else None

    def _container(self, scanner: TextScanner, opening: str, depth: int) -> Steps[str | None]:
        closing = "}" if opening == "{" else "]"
        scanner.take()
        members: list[str] = []
        while (following := (yield from scanner.skip_space())) != closing:
            if members and following == ",":
                scanner.take()
                yield from scanner.skip_space()
            elif members:
                return None
            key = (yield from self._key(scanner)) if opening == "{" else ""
            value = None if key is None else (yield from self._value(scanner, depth + 1))
            if value is None:
                return None
            members.append(f"{key}{value}")
        scanner.take()
        return f"{opening}{', '.join(members)}{closing}"

    def _key(self, scanner: TextScanner) -> Steps[str | None]:
        if (yield from scanner.peek()) == "<":
            key = yield from self._string(scanner)
            if key is None or (yield from scanner.skip_space()) != ":":
                return None
        else:
            text, tag = yield from scanner.text_until(self._key_end, consume=False)
            text = text.strip().strip('"')
            if not text or tag != ":":
                return None
            key = json.dumps(text, ensure_ascii=False)
        scanner.take()
        return f"{key}: "

    def _string(self, scanner: TextScanner) -> Steps[str | None]:
        if not (yield from scanner.skip_tag(self._quote)):
            return None
        text, tag = yield from scanner.text_until(self._quote)
        return None if tag is None else json.dumps(text, ensure_ascii=False)


def _checked(text: str | None) -> str | None:
    try:
        json.loads(text or "")
    except ValueError:
        return None
    return text


def _format(begin: str, end: str, quote: str) -> ToolFormat:
    return ToolFormat(GemmaCalls(begin, end, quote).read, (begin, end, quote), ())


GEMMA4 = _format("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _format("<start_function_call>", "<end_function_call>", "<escape>")
