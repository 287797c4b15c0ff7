"""Questions as a model reads them, each option behind a label that is one token, and answers from the labels'
probabilities."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError
from quire.serving.dialects.decisions.schemas import ChoiceQuestion, PredicateQuestion, Question, ScoreQuestion, shown

_LETTERS, _DIGITS = string.ascii_uppercase, string.digits


@dataclass(frozen=True)
class Asked:
    """A question with the labels of its options, in their order; `text` is what the model reads."""

    question: Question
    labels: tuple[str, ...]
    text: str


def asked(question: Question, place: str) -> Asked:
    """A question as it is asked. Raises a RequestError that names its place if it has too many options, or equal
    ones."""
    instructions, labels = shown(question.instructions, f"{place}.instructions"), _LETTERS
    options: list[tuple[str, str | None]] = [("true", None), ("false", None)]
    match question:
        case PredicateQuestion():
            instructions = f"Is this statement about the above true or false? {instructions}"
        case ChoiceQuestion(choices=choices):
            options = [(_written(each.value), each.description) for each in choices]
            _check_options([(type(each.value), each.value) for each in choices], len(labels), f"{place}.choices")
        case ScoreQuestion(levels=levels):
            options, labels = [(each.label, each.description) for each in levels], _DIGITS
            _check_options([each.label for each in levels], len(labels), f"{place}.levels")
    lines = [
        f"{label}: {name}{f' ({about})' if about else ''}"
        for label, (name, about) in zip(labels, options, strict=False)  # there are more labels
    ]
    kind = "number" if isinstance(question, ScoreQuestion) else "letter"
    text = "\n".join([instructions, *lines, f"Answer with the {kind} of one option, and nothing else."])
    return Asked(question, tuple(labels[: len(options)]), text)


def _written(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _check_options(options: Sequence[Any], most: int, place: str) -> None:
    if not 2 <= len(options) <= most:
        raise RequestError(f"{place} must have 2 to {most} entries, got {len(options)}.", param=place)
    if len(set(options)) < len(options):
        raise RequestError(f"{place} has an entry twice.", param=place)


def answer(asked: Asked, logprobs: Mapping[str, float]) -> dict[str, Any]:
    """OpenAI's answer, from the log probability of each label at the place of the answer.

    Probabilities are those among the labels. `confidence` is that of the likeliest label among all tokens, so it is low
    where the model would have said something else.
    """
    weights = [math.exp(logprobs[label]) for label in asked.labels]
    mass = sum(weights)
    shares = [weight / mass for weight in weights] if mass else [1 / len(weights)] * len(weights)
    best = max(range(len(shares)), key=shares.__getitem__)
    name, confidence = asked.question.name, weights[best]
    match asked.question:
        case PredicateQuestion():
            return {"type": "predicate", "name": name, "probability": shares[0]}
        case ChoiceQuestion(choices=choices):
            each = [{"value": one.value, "probability": share} for one, share in zip(choices, shares, strict=True)]
            chosen = {"type": "choice", "name": name, "choice": choices[best].value}
            return {**chosen, "confidence": confidence, "probabilities": each}
        case ScoreQuestion(levels=levels):
            rated = [
                {"value": at, "label": level.label, "probability": share}
                for at, (level, share) in enumerate(zip(levels, shares, strict=True))
            ]
            score = sum(at * share for at, share in enumerate(shares))
            return {
                "type": "score", "name": name, "score": score, "confidence": confidence, "probabilities": rated,
            }  # fmt: skip
