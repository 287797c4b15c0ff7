"""The examination: held-out questions spread evenly over the tasks, and the table of what was answered right.

Knows nothing about where the answers come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from quill.chat import Sample
from quill.heldout import normalize
from quill.tasks import EXAMINED, TASKS, draw

QUESTIONS = 1000
MAX_ANSWER_TOKENS = 256
_SEED = 20_000


def examination(questions: int = QUESTIONS) -> list[Sample]:
    """The same questions every time, no two alike, the tasks in turn."""
    found: list[Sample] = []
    seen: set[str] = set()
    rngs = {name: Random(f"{_SEED} {name}") for name in EXAMINED}
    for number in range(questions):
        name = EXAMINED[number % len(EXAMINED)]
        make = TASKS[name].examine
        assert make is not None
        sample = draw(make, rngs[name], "held_out")
        while prompt_text(sample) in seen:
            sample = draw(make, rngs[name], "held_out")
        seen.add(prompt_text(sample))
        found.append(sample)
    return found


def prompt_text(sample: Sample) -> str:
    """All that is said before the answer, normalized."""
    return normalize("\n".join(f"{m.role} {m.content}" for m in sample.question))


@dataclass(frozen=True)
class Score:
    task: str
    right: int
    asked: int

    @property
    def percent(self) -> float:
        return 100 * self.right / self.asked


@dataclass(frozen=True)
class Report:
    """Scores in the order of the tasks, and the indices of the questions that were answered wrong."""

    scores: tuple[Score, ...]
    wrong: tuple[int, ...]

    @property
    def overall(self) -> Score:
        return Score("overall", sum(s.right for s in self.scores), sum(s.asked for s in self.scores))

    def table(self) -> str:
        rows = [*self.scores, self.overall]
        return "\n".join(
            [
                "task          right  asked      %",
                *(f"{s.task:<12} {s.right:6d} {s.asked:6d} {s.percent:6.1f}" for s in rows),
            ]
        )

    def as_json(self) -> dict[str, dict[str, int | float]]:
        return {
            s.task: {"right": s.right, "asked": s.asked, "percent": round(s.percent, 2)}
            for s in (*self.scores, self.overall)
        }


def grade(samples: Sequence[Sample], answers: Sequence[str]) -> Report:
    right = [sample.check(answer) for sample, answer in zip(samples, answers, strict=True)]
    tasks = dict.fromkeys(sample.task for sample in samples)
    scores = tuple(
        Score(
            task,
            sum(ok for ok, s in zip(right, samples, strict=True) if s.task == task),
            sum(s.task == task for s in samples),
        )
        for task in tasks
    )
    return Report(scores, tuple(i for i, ok in enumerate(right) if not ok))
