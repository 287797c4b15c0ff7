"""Reasoning between two tags, in front of the answer.

Owns the states: the prompt may have opened the reasoning already, or closed it (thinking switched off); otherwise the
output says so itself. Tags behind the reasoning are ordinary text.

Sources: DeepSeek-R1's and Qwen3's chat templates, and the model cards of Qwen3, QwQ and GLM-4.5.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.output_parsers.events import OutputEvent, ReasoningDelta
from quire.output_parsers.formats import ReasoningFormat, Turn
from quire.output_parsers.scanner import Steps, Tags, TextScanner


def tagged(start: str, end: str, *, always: bool) -> ReasoningFormat:
    """Reasoning between `start` and `end`.

    Args:
        start, end: The tags.
        always: The model thinks in every answer: an output without the first tag begins with reasoning.
    """
    opening, closing = Tags(start), Tags(end)

    def read(scanner: TextScanner, turn: Turn) -> Steps[None]:
        opened = _opened(turn, start, end)
        if opened is False:
            return
        scanner.start_recording()
        yield from scanner.skip_space()
        if (yield from scanner.skip_tag(opening)) is None:
            scanner.read_again(scanner.recorded())
            if opened is None and not always:
                return
        scanner.recorded()
        yield from scanner.skip_newlines()
        reasoning = _Reasoning()
        if (yield from scanner.until(closing, reasoning.text)) is None:
            yield from reasoning.cut_off()
        yield from scanner.skip_newlines()

    return ReasoningFormat(read, end=end, special_tokens=(start, end))


def _opened(turn: Turn, start: str, end: str) -> bool | None:
    """Whether the reasoning has begun (True) or ended (False) before the output; None if the output will tell."""
    if start in turn.continued or end in turn.continued:
        return turn.continued.rfind(start) > turn.continued.rfind(end)
    prompt = turn.prompt.rstrip()
    if prompt.endswith(start):
        return True
    return False if prompt.endswith(end) or turn.continued.strip() else None


class _Reasoning:
    """Leaves out the newlines at the end, which belong to the tag."""

    def __init__(self) -> None:
        self._newlines: list[str] = []

    def text(self, piece: str) -> Iterator[OutputEvent]:
        kept = piece.rstrip("\r\n")
        if kept:
            yield ReasoningDelta("".join(self._newlines) + kept)
            self._newlines = []
        if len(kept) < len(piece):
            self._newlines.append(piece[len(kept) :])

    def cut_off(self) -> Iterator[OutputEvent]:
        if self._newlines:
            yield ReasoningDelta("".join(self._newlines))


DEEPSEEK_R1 = tagged("<think>", "</think>", always=True)
QWEN3 = tagged("<think>", "</think>", always=False)
