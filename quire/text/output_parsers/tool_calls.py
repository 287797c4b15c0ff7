"""Writing an answer's content and tool calls as events, and reading calls that are written as JSON objects.

Decides which white space is content, and numbers the calls. Many formats share the object `{"name": …, "arguments":
…}`.
Knows nothing about the tags around it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

from quire.text.output_parsers.events import ContentDelta, OutputEvent, Tool, ToolCallDelta, ToolCallStart
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner, collect

NAME_KEYS = ("name", "tool_name")
ARGUMENTS_KEYS = ("arguments", "parameters")


class Answer:
    """One choice's content and calls, in order.

    White space at the beginning, and behind a call, waits for what follows it: text, which it belongs to, or a call or
    the end, where it is dropped. `new_id` makes ids for calls that have none in the text; without it they have none.
    """

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        self._new_id = new_id
        self._count = 0
        self._waiting: list[str] | None = []

    def text(self, piece: str) -> Iterator[OutputEvent]:
        """More text outside of calls, or none."""
        if not piece:
            return
        if self._waiting is None:
            yield ContentDelta(piece)
        else:
            self._waiting.append(piece)
            if not piece.isspace():
                waited, self._waiting = self._waiting, None
                yield ContentDelta("".join(waited))

    def finish(self) -> Iterator[OutputEvent]:
        """The text has ended. White space alone is content where there was nothing else."""
        if self._waiting and not self._count:
            yield ContentDelta("".join(self._waiting))
        self._waiting = None

    def start(self, name: str, call_id: str | None = None) -> Iterator[OutputEvent]:
        """The next call begins."""
        self._waiting = []
        if call_id is None and self._new_id:
            call_id = self._new_id()
        yield ToolCallStart(self._count, name, call_id)
        self._count += 1

    def arguments(self, piece: str) -> Iterator[OutputEvent]:
        """More JSON text of the arguments of the call that began last."""
        yield ToolCallDelta(self._count - 1, piece)

    def whole(self, name: str, arguments: str) -> Iterator[OutputEvent]:
        """A call of which everything is known."""
        yield from self.start(name)
        yield from self.arguments(arguments)


ReadCalls: TypeAlias = Callable[[TextScanner, Answer, Collection[str] | None], Steps[bool]]
"""Reads the calls that begin here, of tools of these names (None: of any), while the scanner records. Returns whether
there were any; what was recorded then is content, or nothing."""


def read_unmarked_calls(
    scanner: TextScanner, answer: Answer, tools: Sequence[Tool], tag: str, read_calls: ReadCalls
) -> Steps[None]:
    """Read content, and calls without marks at the beginning of a line or behind `tag`, which is no content then."""
    names = {tool.name for tool in tools} or None
    beginnings, tags = Tags("\n", tag), Tags(tag)
    before: str | None = ""
    while before is not None:
        scanner.start_recording(before)
        yield from scanner.skip_space()
        yield from scanner.skip_tag(tags)
        called = yield from read_calls(scanner, answer, names)
        yield from answer.text(scanner.recorded())
        before = yield from scanner.until(beginnings, answer.text)
        if before == "\n" and not called:
            yield from answer.text(before)
            before = ""


class JsonCall:
    """Reads one call that is a JSON object, its members in any order.

    The call starts when its name and the beginning of its arguments have arrived; from there the arguments are passed
    on as they stand. What is wrong before is no call.

    Args:
        closing: Tags that may follow the object: arguments that lack a bracket end before them.
        names: Tools that may be called; None for whatever the model writes.
        whole: Whether a call has a name and `arguments`, and nothing else in front of the latter. Otherwise other
            members are passed over, and a call without arguments is one too.
    """

    def __init__(
        self,
        scanner: TextScanner,
        answer: Answer,
        *,
        closing: Tags,
        names: Collection[str] | None,
        whole: bool = False,
    ) -> None:
        self._scanner = scanner
        self._answer = answer
        self._closing = closing
        self._names = names
        self._whole = whole
        self._name: str | None = None
        self._held: str | None = None
        self._started = False

    def read(self) -> Steps[bool]:
        """Read the object that begins here. False if it is no call, and nothing came out."""
        scanner = self._scanner
        if (yield from scanner.peek()) != "{":
            return False
        scanner.take()
        whole = (yield from scanner.skip_space()) == "}"
        while not whole:
            if not (yield from self._member()):
                return self._started
            separator = yield from scanner.skip_space()
            if separator not in ("}", ","):
                return self._started
            if separator == ",":
                scanner.take()
                yield from scanner.skip_space()
            whole = separator == "}"
        scanner.take()
        if not self._started and self._name is not None and not self._whole:
            yield from self._start(self._held or "{}")
        return self._started

    def _member(self) -> Steps[bool]:
        """Read `"key": value`; False if it is none or cannot be part of a call."""
        scanner = self._scanner
        key = _decoded((yield from scanner.json_string()))
        if self._whole and not self._started and key not in ("name", "arguments"):
            return False
        if key is None or (yield from scanner.skip_space()) != ":":
            return False
        scanner.take()
        first = yield from scanner.skip_space()
        if key in ARGUMENTS_KEYS and first == "{" and self._name is not None and not self._started:
            yield from self._start("")
            return (yield from scanner.json_container(self._closing, self._answer.arguments))
        value = yield from self._value(first)
        if value is None:
            return False
        if key in NAME_KEYS:
            return self._set_name(value)
        if key in ARGUMENTS_KEYS and not self._started:
            self._held = _object_text(value)
            if self._held is None:
                return False
            if self._name is not None:
                yield from self._start(self._held)
        return True

    def _value(self, first: str) -> Steps[str | None]:
        """The JSON text of a value that begins with this character; None if it is broken."""
        if first == '"':
            return (yield from self._scanner.json_string())
        if first in ("{", "["):
            pieces: list[str] = []
            whole = yield from self._scanner.json_container(self._closing, collect(pieces))
            return "".join(pieces) if whole else None
        return (yield from self._scanner.json_word()) or None

    def _set_name(self, value: str) -> bool:
        name = _decoded(value)
        if not name or self._started or (self._names is not None and name not in self._names):
            return False
        self._name = name
        return True

    def _start(self, arguments: str) -> Iterator[OutputEvent]:
        assert self._name is not None and not self._started
        self._started = True
        self._scanner.recorded()
        yield from self._answer.start(self._name)
        if arguments:
            yield from self._answer.arguments(arguments)


def _decoded(text: str | None) -> str | None:
    """The string that a JSON string says; None if it is none."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _object_text(value: str) -> str | None:
    """Arguments as an object, from one, from a string with one, or from null; None for anything else."""
    text = value if (inner := _decoded(value)) is None else inner
    if text.lstrip().startswith("{"):
        return text
    return "{}" if value == "null" or text == "" else None
