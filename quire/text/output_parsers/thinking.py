"""Reasoning between two tags, in front of the answer.

The prompt may have opened the reasoning already, or closed it (thinking switched off); otherwise the output tells. Tags
behind the reasoning are ordinary text.

Sources: the chat templates and model cards of DeepSeek-R1 and V3.1, Qwen3, QwQ, GLM-4.5, Kimi-K2-Thinking, MiniMax-M2,
Seed-OSS, Command A and Gemma 4; the model cards of mistralai/Magistral-Small-2509 and
ibm-granite/granite-3.2-8b-instruct.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quire.text.output_parsers.events import OutputEvent, ReasoningDelta
from quire.text.output_parsers.formats import ReasoningFormat, Turn
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner


def tagged(
    start: str | tuple[str, ...], end: str | tuple[str, ...], *, always: bool, interrupts: tuple[str, ...] = ()
) -> ReasoningFormat:
    """Return the form of reasoning between `start` and `end`, each in any of its spellings. If the model `always`
    thinks, an output without the first tag begins with reasoning. A tag of the answer in `interrupts` ends the
    reasoning as well."""
    starts, ends = (start,) if isinstance(start, str) else start, (end,) if isinstance(end, str) else end
    opening, closing = Tags(*starts), Tags(*ends, *interrupts)

    def opened_in(turn: Turn) -> bool | None:
        found = _opened(turn, starts, ends)
        return True if found is None and always else found

    def read(scanner: TextScanner, turn: Turn) -> Steps[None]:
        opened = opened_in(turn)
        if opened is False:
            return
        scanner.start_recording()
        yield from scanner.skip_space()
        tag = yield from scanner.skip_tag(opening)
        before = scanner.recorded()
        if tag is None:
            scanner.read_again(before)
            if opened is None:
                return
        yield from scanner.skip_newlines()
        reasoning = _Reasoning()
        tag = yield from scanner.until(closing, reasoning.text, consume=False)
        if tag is None:
            yield from reasoning.cut_off()
        elif tag in ends:
            yield from scanner.skip_tag(closing)
            yield from scanner.skip_newlines()

    return ReasoningFormat(read, opened_in, starts[0], ends[0], special_tokens=(*starts, *ends), interrupts=interrupts)


def _opened(turn: Turn, starts: tuple[str, ...], ends: tuple[str, ...]) -> bool | None:
    """Whether the reasoning has begun (True) or ended (False) before the output; None if the output will tell."""
    started = max(turn.continued.rfind(tag) for tag in starts)
    ended = max(turn.continued.rfind(tag) for tag in ends)
    if started >= 0 or ended >= 0:
        return started > ended
    prompt = turn.prompt.rstrip()
    if prompt.endswith(starts):
        return True
    return False if prompt.endswith(ends) or turn.continued.strip() else None


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


_THINK = ("<think>", "</think>")

DEEPSEEK_R1 = tagged(*_THINK, always=True)
DEEPSEEK_V3 = tagged(*_THINK, always=False)
GLM45 = tagged(*_THINK, always=False)
GRANITE = tagged(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    always=False,
)
KIMI_K2 = tagged(*_THINK, always=False, interrupts=("<|tool_calls_section_begin|>",))
MINIMAX_M2 = tagged(*_THINK, always=True)
COHERE_COMMAND3 = tagged("<|START_THINKING|>", "<|END_THINKING|>", always=False)
GEMMA4 = replace(tagged("<|channel>thought", "<channel|>", always=False), special_tokens=("<|channel>", "<channel|>"))
MISTRAL = tagged("[THINK]", "[/THINK]", always=False)
QWEN3 = tagged(*_THINK, always=False)
SEED_OSS = tagged("<seed:think>", "</seed:think>", always=False)
