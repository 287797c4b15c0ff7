"""Reads the tables of wordings in ``texts/``: blocks of what people say and what Quill answers.

A block is lines of patterns (see ``phrasing``), then ``? pattern`` for what is asked about it later, ``= answer`` (in
which ``\\n`` is a new line) and at most one line ``! word, word``. Blocks are parted by empty lines; a first block of
lines ``#`` says what the file holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MARKS = ("? ", "= ", "! ")


@dataclass(frozen=True)
class Block:
    """``answers`` are equally right; ``words`` must stand in any right answer."""

    patterns: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    words: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.patterns, self
        assert self.answers, self


def read_blocks(name: str) -> tuple[Block, ...]:
    text = (Path(__file__).parent / "texts" / f"{name}.txt").read_text(encoding="utf-8")
    return tuple(_block(part.strip().splitlines()) for part in text.split("\n\n") if not part.startswith("#"))


def _block(lines: list[str]) -> Block:
    patterns = tuple(line for line in lines if not line.startswith(_MARKS))
    questions, answers, words = (
        [line.removeprefix(mark) for line in lines if line.startswith(mark)] for mark in _MARKS
    )
    return Block(
        patterns,
        tuple(questions),
        tuple(answer.replace("\\n", "\n") for answer in answers),
        tuple(word.strip() for line in words for word in line.split(",")),
    )
