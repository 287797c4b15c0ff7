"""The texts to measure on: passages that come with the package, or the user's own prompts, some with answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, reason

PASSAGES = Path(__file__).with_name("passages.txt")
_BETWEEN = re.compile(r"\n\n(?=\S)(?!assert )")
_FIELDS = {"prompt", "messages", "answer"}
_WORD = re.compile(r"[^\W_]+(?:[.,:]\d+)*")


@dataclass(frozen=True)
class Question:
    """A line of a prompts file: either a prompt or messages.

    Attributes:
        prompt: Text or token ids.
        messages: A conversation, in OpenAI's format.
        answers: Right answers, of which one is enough; empty if the line is not scored.
    """

    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    answers: tuple[str, ...]

    @property
    def needs_text(self) -> bool:
        return not isinstance(self.prompt, list) or bool(self.answers)

    def is_answered_by(self, text: str) -> bool:
        """Whether the text has the words of an answer in a row; case and punctuation do not count."""
        said = _words(text)
        return any(f" {wanted} " in f" {said} " for wanted in map(_words, self.answers))


def read_passages() -> list[str]:
    """The built-in texts."""
    return _BETWEEN.split(PASSAGES.read_text(encoding="utf-8").strip())


def read_questions(path: str) -> list[Question]:
    """The questions of a file with a JSON object a line.

    Raises:
        ConfigError: The file cannot be read, or has a line that is no question; the message names it.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {reason(error)}.", param="prompts") from error
    questions = [_question(line, f"--prompts {path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ConfigError(f'--prompts {path} has no prompts: write {{"prompt": "..."}} a line.', param="prompts")
    return questions


def _question(line: str, where: str) -> Question:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: this is no JSON object: {reason(error)}.", param="prompts") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ConfigError(f'{where}: an object with either "prompt" or "messages" is needed.', param="prompts")
    if unknown := entry.keys() - _FIELDS:
        raise ConfigError(f'{where}: "{min(unknown)}" is not one of {", ".join(sorted(_FIELDS))}.', param="prompts")
    prompt, messages, answer = entry.get("prompt"), entry.get("messages"), entry.get("answer")
    if messages is None and not (_is_text(prompt) or _is_list_of(prompt, int)):
        raise ConfigError(f'{where}: "prompt" is neither text nor a list of token ids.', param="prompts")
    if messages is not None and not _is_list_of(messages, dict):
        raise ConfigError(f'{where}: "messages" is no list of objects.', param="prompts")
    answers = [] if answer is None else [answer] if isinstance(answer, str) else answer
    if answer is not None and not (_is_list_of(answers, str) and all(map(_words, answers))):
        raise ConfigError(f'{where}: "answer" is neither text nor a list of texts.', param="prompts")
    return Question(prompt, messages, tuple(answers))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_list_of(values: object, kind: type) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is kind for value in values)


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.casefold()))


def percent_right(questions: Sequence[Question], texts: Sequence[str]) -> float:
    """The percentage of questions with answers that are answered right."""
    right = [each.is_answered_by(text) for each, text in zip(questions, texts, strict=True) if each.answers]
    return 100 * sum(right) / len(right)
