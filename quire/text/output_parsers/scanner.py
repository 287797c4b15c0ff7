"""Reading a text that is still arriving as if it were all there.

A format is a generator that reads from a `TextScanner` and yields events. Where the text that has arrived does not
decide what comes next, the scanner yields None, and goes on when there is more. So there is one code for whole and for
streamed text, and what it does depends on the characters alone, never on where they were cut. Every character is looked
at a constant number of times. Just the text that may still become a tag is held back. Knows nothing about any format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

from quire.text.output_parsers.events import OutputEvent, merge_events

T = TypeVar("T")
Steps: TypeAlias = Generator[OutputEvent | None, None, T]
"""A part of a format: yields events, or None when it needs more text; returns what it found."""

Emit: TypeAlias = Callable[[str], Iterable[OutputEvent]]
"""What becomes of a piece of text."""

Format: TypeAlias = Callable[["TextScanner"], Steps[None]]
"""A whole format: reads all text there is."""

_NEVER = "(?!)"
_IN_STRING = re.compile(r'["\\]')
_PYTHON_STRUCTURE = re.compile("[][(){}'\"]")
_PYTHON_QUOTES = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}
_NO_SPACE = re.compile(r"[^ \t\r\n]")
_NO_NEWLINE = re.compile(r"[^\r\n]")


class Tags:
    """Strings to look for, together: of those that begin at the same place, the longest counts."""

    def __init__(self, *tags: str) -> None:
        self.tags = tuple(sorted(dict.fromkeys(tags), key=len, reverse=True))
        whole = "|".join(map(re.escape, self.tags)) or _NEVER
        self.whole = re.compile(whole)
        self.json_structure = re.compile(r'["{}\[\]]|' + whole)
        self._heads = {tag[:length] for tag in self.tags for length in range(1, len(tag))}
        self._longest_head = max(map(len, self._heads), default=0)
        self._firsts = re.compile("|".join(re.escape(c) for c in sorted({tag[0] for tag in self.tags})) or _NEVER)

    def partial(self, text: str, start: int) -> int:
        """Where the end of `text` begins to look like a tag, from `start` on; the length of the text if nowhere."""
        at = max(start, len(text) - self._longest_head)
        while match := self._firsts.search(text, at):
            if text[match.start() :] in self._heads:
                return match.start()
            at = match.start() + 1
        return len(text)


class TextScanner:
    """The text that has arrived and was not read yet. `ended` says that no more will come, and `whole` that the model
    has ended it by itself."""

    def __init__(self) -> None:
        self.ended = self.whole = False
        self._text = ""
        self._at = 0
        self._recorded: list[str] | None = None

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def start_recording(self, before: str = "") -> None:
        """Remember all that is read from now on, for when it turns out to be something else. `before` is put first."""
        self._recorded = [before]

    def recorded(self) -> str:
        """What was read since `start_recording`, which ends."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text

    def read_again(self, text: str) -> None:
        """Put text in front of what is unread. For a few characters, or once: it copies what has arrived."""
        self._text = text + self._text[self._at :]
        self._at = 0

    def until(self, tags: Tags, emit: Emit, *, consume: bool = True) -> Steps[str | None]:
        """Read up to the first of the tags, and that, if `consume`. Returns the tag; None if the text ends before."""
        while True:
            match = tags.whole.search(self._text, self._at)
            begin = match.start() if match else len(self._text)
            partial = len(self._text) if self.ended else tags.partial(self._text, self._at)
            if piece := self._take(min(begin, partial)):
                yield from emit(piece)
            if match and begin < partial:
                if consume:
                    self._take(match.end())
                return match.group()
            if self.ended:
                return None
            yield None

    def text_until(self, tags: Tags, *, consume: bool = True) -> Steps[tuple[str, str | None]]:
        """The text up to the first of the tags, and what `until` returns."""
        pieces: list[str] = []
        tag = yield from self.until(tags, collect(pieces), consume=consume)
        return "".join(pieces), tag

    def skip_tag(self, tags: Tags) -> Steps[str | None]:
        """Read one of the tags if it stands here; None if none does."""
        while True:
            match = tags.whole.match(self._text, self._at)
            if not self.ended and tags.partial(self._text, self._at) == self._at < len(self._text):
                yield None
            elif match:
                self._take(match.end())
                return match.group()
            elif self.ended or self._at < len(self._text):
                return None
            else:
                yield None

    def peek(self) -> Steps[str]:
        """The next character, which stays unread; empty at the end of the text."""
        while self._at == len(self._text) and not self.ended:
            yield None
        return self._text[self._at : self._at + 1]

    def skip_space(self) -> Steps[str]:
        """Read white space; the character behind it, which stays unread, or empty at the end of the text."""
        return (yield from self._skip_to(_NO_SPACE))

    def skip_newlines(self) -> Steps[str]:
        """Like `skip_space`, for newlines alone."""
        return (yield from self._skip_to(_NO_NEWLINE))

    def take(self) -> str:
        """Read one character that `peek` has shown."""
        return self._take(self._at + 1)

    def json_string(self) -> Steps[str | None]:
        """The JSON string that begins here, with its quotes; None if it does not end in this line, or there is none."""
        if (yield from self.peek()) != '"':
            return None
        pieces = [self.take()]
        whole = yield from self._rest_of_string(collect(pieces), one_line=True)
        return "".join(pieces) if whole else None

    def json_container(self, tags: Tags, emit: Emit) -> Steps[bool]:
        """Read the JSON object or array that begins here.

        Returns:
            True behind its last bracket. False at the end of the text or, since no JSON has one outside of a string,
            before a tag.
        """
        depth = 0
        while True:
            match = tags.json_structure.search(self._text, self._at)
            if match is None:
                held = len(self._text) if self.ended else tags.partial(self._text, self._at)
                if piece := self._take(held):
                    yield from emit(piece)
                if self.ended:
                    return False
                yield None
                continue
            found = match.group()
            if found in "{}[]":
                depth += 1 if found in "{[" else -1
                yield from emit(self._take(match.end()))
                if depth == 0:
                    return True
            elif found == '"':
                yield from emit(self._take(match.end()))
                if not (yield from self._rest_of_string(emit, one_line=False)):
                    return False
            else:
                yield from emit(self._take(match.start()))
                return False

    def json_word(self) -> Steps[str]:
        """The number, or the word like `true`, that begins here; empty if there is none."""
        text: list[str] = []
        while (character := (yield from self.peek())) and (character.isalnum() or character in "+-._"):
            text.append(self.take())
        return "".join(text)

    def python_brackets(self) -> Steps[str | None]:
        """The text from the bracket here to the one that closes it, outside of strings; None if none does."""
        pieces: list[str] = []
        depth, quote = 0, ""
        while (yield from self.peek()):
            match = (_PYTHON_QUOTES[quote] if quote else _PYTHON_STRUCTURE).search(self._text, self._at)
            if match is None:
                pieces.append(self._take(len(self._text)))
                continue
            found = match.group()
            if found == "\\" and match.end() == len(self._text):
                if self.ended:
                    break
                pieces.append(self._take(match.start()))
                yield None
                continue
            pieces.append(self._take(match.end() + (found == "\\")))
            if found in "'\"":
                quote = "" if quote else found
            elif found in "([{":
                depth += 1
            elif found in ")]}":
                depth -= 1
                if not depth:
                    return "".join(pieces)
        return None

    def _skip_to(self, wanted: re.Pattern[str]) -> Steps[str]:
        while True:
            match = wanted.search(self._text, self._at)
            self._take(match.start() if match else len(self._text))
            if match or self.ended:
                return match.group() if match else ""
            yield None

    def _rest_of_string(self, emit: Emit, *, one_line: bool) -> Steps[bool]:
        """Read a string from behind its opening quote. Returns True behind the closing one."""
        while True:
            match = _IN_STRING.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            if one_line and (newline := self._text.find("\n", self._at, end)) >= 0:
                yield from emit(self._take(newline))
                return False
            yield from emit(self._take(end))
            if match and match.group() == '"':
                yield from emit(self.take())
                return True
            if match and end + 1 < len(self._text):
                yield from emit(self._take(self._at + 2))
            elif self.ended:
                yield from emit(self._take(len(self._text)))
                return False
            else:
                yield None

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._recorded is not None:
            self._recorded.append(text)
        return text


def collect(pieces: list[str]) -> Emit:
    """Make an Emit that adds text to `pieces` and makes no events of it."""

    def add(piece: str) -> Iterable[OutputEvent]:
        pieces.append(piece)
        return ()

    return add


class OutputParser:
    """Takes one choice's text apart while it arrives, as a format reads it.

    Events that are merged (`merge_events`) are the same however the text was cut. No text is ever lost, and none makes
    a parser raise: what is no well-formed call is content.
    """

    def __init__(self, read: Format) -> None:
        self._scanner = TextScanner()
        self._steps = read(self._scanner)

    def feed(self, text: str) -> list[OutputEvent]:
        """The events that more text completes. Only text that may still become a tag is held back."""
        self._scanner.add(text)
        return self._run()

    def finish(self, *, whole: bool = False) -> list[OutputEvent]:
        """The events that remain when the text was cut off, or, if it is `whole`, the model has ended it. No text may
        follow."""
        self._scanner.ended, self._scanner.whole = True, whole
        return self._run()

    def _run(self) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return merge_events(events)
