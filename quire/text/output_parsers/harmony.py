"""GPT-OSS's harmony format: messages with a channel each, all in one output.

The analysis channel is reasoning; a message to `functions.NAME` is a call; all other messages are content.

Source: docs/format.md in openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from quire.text.output_parsers.events import OutputEvent, ReasoningDelta, Tool
from quire.text.output_parsers.formats import CallSyntax, ReasoningFormat, ToolFormat, Turn
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.tool_calls import Answer

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
SPECIAL_TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_NEXT = f"{START}assistant"
_RECIPIENT = Tags(" to=", "to=")  # the prompt ends with the assistant's role, so an output may begin with this
_HEADER = Tags(START, CHANNEL, MESSAGE, END, CALL, RETURN)
_BODY = Tags(MESSAGE, START, END, CALL, RETURN)
_ENDS = Tags(START, END, CALL, RETURN)
_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyAnswer:
    """Reads one output."""

    def __init__(self, scanner: TextScanner, answer: Answer, *, with_calls: bool) -> None:
        self._scanner = scanner
        self._with_calls = with_calls
        self._answer = answer
        self._said: set[str] = set()

    def read(self) -> Steps[None]:
        """Read all messages. Text outside of any is content."""
        tag = yield from self._scanner.skip_tag(_RECIPIENT)
        while tag or (tag := (yield from self._scanner.until(_HEADER, self._answer.text))):
            if tag not in (END, CALL, RETURN):
                yield from self._message(tag)
            tag = None

    def _message(self, before: str) -> Steps[None]:
        """Read a message behind the first tag of its header, or behind all of it."""
        header = before
        if before != MESSAGE:
            text, after = yield from self._scanner.text_until(_BODY, consume=False)
            header += text
            if after != MESSAGE:  # cut off or broken
                yield from self._answer.text(header)
                return
            yield from self._scanner.skip_tag(_BODY)
        recipient, channel = _TO.search(header), _CHANNEL.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else None
        if self._with_calls and recipient and name and recipient[1] != name:
            yield from self._call(name)
        elif channel and channel[1] == "analysis":
            yield from self._text("reasoning", lambda piece: iter((ReasoningDelta(piece),)))
        else:
            yield from self._text("content", self._answer.text)

    def _call(self, name: str) -> Steps[None]:
        yield from self._answer.start(name)
        empty = (yield from self._scanner.skip_space()) in ("", "<")
        yield from self._scanner.until(_ENDS, self._answer.arguments, consume=False)
        if empty:
            yield from self._answer.arguments("{}")

    def _text(self, kind: str, emit: Callable[[str], Iterator[OutputEvent]]) -> Steps[None]:
        """Read a message's text; one newline separates it from an earlier message of its kind."""
        first = True

        def emit_separated(piece: str) -> Iterator[OutputEvent]:
            nonlocal first
            yield from emit("\n" + piece if first and kind in self._said else piece)
            first = False

        yield from self._scanner.until(_ENDS, emit_separated, consume=False)
        self._said.add(kind)


def read(scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
    yield from HarmonyAnswer(scanner, answer, with_calls=True).read()


def read_without_calls(scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
    """Read an answer where no tool parser is chosen: calls are content."""
    yield from HarmonyAnswer(scanner, answer, with_calls=False).read()


def _no_prefix(scanner: TextScanner, turn: Turn) -> Steps[None]:
    """Read nothing: reasoning is one of the messages, which are read with the answer."""
    yield from ()


def _undecided(turn: Turn) -> None:
    """Decide nothing: the channel of a message says whether it is reasoning."""


FORMAT = ToolFormat(
    read,
    special_tokens=SPECIAL_TOKENS,
    syntaxes=(
        CallSyntax(
            f"{CHANNEL}commentary to=functions.",
            f" {CONSTRAIN}json{MESSAGE}",
            CALL,
            separator=_NEXT,
            messages=tuple((f"{CHANNEL}{channel}{MESSAGE}", END + _NEXT) for channel in ("analysis", "commentary")),
            last_message=f"{CHANNEL}final{MESSAGE}",
        ),
    ),
)
REASONING = ReasoningFormat(
    _no_prefix,
    _undecided,
    start=f"{CHANNEL}analysis{MESSAGE}",
    end=END + _NEXT,
    special_tokens=SPECIAL_TOKENS,
    answer=read_without_calls,
    answer_start=f"{CHANNEL}final{MESSAGE}",
)
