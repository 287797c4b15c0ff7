"""Content around tool calls.

Owns which white space is content: not what merely separates calls from each other, or from the beginning and the end
of the text. Knows no format.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.text.output_parsers.events import ContentDelta, OutputEvent


class AnswerText:
    """Turns text outside of calls into content. White space at the beginning, and behind a call, waits for what
    follows it: text, which it belongs to, or a call or the end, where it is dropped."""

    def __init__(self) -> None:
        self._waiting: list[str] | None = []
        self._called = False

    def text(self, piece: str) -> Iterator[OutputEvent]:
        """More text outside of calls, or none."""
        if not piece:
            return
        if self._waiting is None:
            yield ContentDelta(piece)
        else:
            self._waiting.append(piece)
            if not piece.isspace():
                yield ContentDelta("".join(self._waiting))
                self._waiting = None

    def call(self) -> None:
        """A call stands here."""
        self._called = True
        self._waiting = []

    def finish(self) -> Iterator[OutputEvent]:
        """The text has ended. White space alone is content where there was nothing else."""
        if self._waiting and not self._called:
            yield ContentDelta("".join(self._waiting))
        self._waiting = None
