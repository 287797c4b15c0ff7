"""When an answer is right: one small frozen class for each kind of check.

A check sees the answer's text alone. It accepts every right answer, not only the reference, and each class says what
right means. Knows nothing about models, servers or how the question was put.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Protocol

FUNCTION_SECONDS = 10.0
FUNCTION_MEMORY_BYTES = 1 << 30


class Check(Protocol):
    def __call__(self, answer: str) -> bool: ...


@dataclass(frozen=True)
class OneOf:
    """The answer is one of these texts, up to case, spacing and punctuation."""

    answers: frozenset[str]

    def __call__(self, answer: str) -> bool:
        return _plain(answer) in {_plain(a) for a in self.answers}


@dataclass(frozen=True)
class Mentions:
    """Every one of these words or phrases stands in the answer (whole words, any case), and none of those."""

    all_of: tuple[str, ...]
    none_of: tuple[str, ...] = ()

    def __call__(self, answer: str) -> bool:
        return all(_has(answer, w) for w in self.all_of) and not any(_has(answer, w) for w in self.none_of)


@dataclass(frozen=True)
class LastNumber:
    """The last number of the answer is this one; what stands before it (the working) is free."""

    value: str

    def __call__(self, answer: str) -> bool:
        numbers = re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", ""))
        return bool(numbers) and float(numbers[-1]) == float(self.value)


@dataclass(frozen=True)
class Listing:
    """The answer's items after the last colon, split at commas, are these, in this order."""

    items: tuple[str, ...]

    def __call__(self, answer: str) -> bool:
        listed = answer.rsplit(":", 1)[-1].strip().rstrip(".")
        return tuple(item.strip().casefold() for item in listed.split(",")) == tuple(i.casefold() for i in self.items)


@dataclass(frozen=True)
class Picks:
    """The answer is this many different items of the pool, parted by commas."""

    pool: frozenset[str]
    count: int

    def __call__(self, answer: str) -> bool:
        items = [item.strip() for item in answer.strip().rstrip(".").split(",")]
        known = {item.casefold() for item in self.pool}
        found = [item for item in items if item.casefold() in known]
        return len(items) == len(found) == len(set(found)) and len(found) == self.count


@dataclass(frozen=True)
class JsonEquals:
    """The whole answer is one JSON object equal to this one (given as JSON text)."""

    expected: str

    def __call__(self, answer: str) -> bool:
        text = re.sub(r"^```(?:json)?\n|\n```$", "", answer.strip())
        return bool(_parsed(text) == json.loads(self.expected))


@dataclass(frozen=True)
class JsonKeys:
    """The whole answer is one JSON object with these keys and no others."""

    keys: frozenset[str]

    def __call__(self, answer: str) -> bool:
        parsed = _parsed(answer.strip())
        return isinstance(parsed, dict) and parsed.keys() == self.keys


@dataclass(frozen=True)
class CallsTool:
    """The answer is exactly one Hermes tool call, with this name and these arguments (given as JSON text)."""

    expected: str

    def __call__(self, answer: str) -> bool:
        match = re.fullmatch(r"<tool_call>\s*(\{.*\})\s*</tool_call>", answer.strip(), re.DOTALL)
        return match is not None and _parsed(match[1]) == json.loads(self.expected)


@dataclass(frozen=True)
class WellFormedText:
    """A text that mentions what was asked for, has a length within bounds, ends properly and does not repeat itself."""

    mentions: tuple[str, ...]
    min_lines: int
    max_lines: int
    min_words: int
    max_words: int

    def __call__(self, answer: str) -> bool:
        lines = [line.strip() for line in answer.strip().splitlines() if line.strip()]
        sentences = [s for line in lines for s in re.split(r"(?<=[.!?])\s+", line)]
        return (
            all(_has(answer, word) for word in self.mentions)
            and self.min_lines <= len(lines) <= self.max_lines
            and self.min_words <= len(answer.split()) <= self.max_words
            and answer.strip()[-1:] in {".", "!", '"'}
            and len(set(sentences)) == len(sentences)
        )


@dataclass(frozen=True)
class Computes:
    """The answer holds Python code whose first function maps each case's arguments to its result.

    ``cases`` is a Python literal: a list of (arguments, result) pairs. The code runs in a process of its own, without
    the site packages, and with limits on time and memory.
    """

    cases: str

    def __call__(self, answer: str) -> bool:
        block = re.search(r"```(?:python)?\n(.*?)```", answer, re.DOTALL)
        code = block[1] if block else answer
        named = re.search(r"^def (\w+)", code, re.MULTILINE)
        return named is not None and self._passes(code, named[1])

    def _passes(self, code: str, function: str) -> bool:
        program = (
            "import resource\n"
            f"resource.setrlimit(resource.RLIMIT_AS, ({FUNCTION_MEMORY_BYTES}, {FUNCTION_MEMORY_BYTES}))\n"
            "resource.setrlimit(resource.RLIMIT_CPU, (2, 2))\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
            f"{code}\n"
            f"for _arguments, _expected in {self.cases}:\n"
            f"    _got = {function}(*_arguments)\n"
            "    assert type(_got) is type(_expected) and _got == _expected\n"
        )
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", program],
                capture_output=True,
                timeout=FUNCTION_SECONDS,
                env={},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s+\-*/=<>]", " ", text.casefold()).split())


def _has(text: str, phrase: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
