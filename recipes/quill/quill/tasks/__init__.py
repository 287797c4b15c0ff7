"""The tasks: a dict of name to how its samples are made, how often they are trained on and how they are examined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from quill.chat import Sample
from quill.heldout import Split, split_of
from quill.tasks import (
    arithmetic,
    counting,
    extraction,
    facts,
    functions,
    limits,
    memory,
    naming,
    recall,
    reversing,
    smalltalk,
    sorting,
    stories,
    toolcalls,
)

Make = Callable[[Random], Sample]


@dataclass(frozen=True)
class Task:
    """``share`` is the task's weight in training; ``chains`` lets it stand next to others in one conversation."""

    make: Make
    share: float
    chains: bool = True
    examine: Make | None = None


def draw(make: Make, rng: Random, split: Split) -> Sample:
    """A sample of the given side of the held-out line."""
    while True:
        sample = make(rng)
        if split_of(sample.key) == split:
            return sample


def _between(rng: Random) -> Sample:
    """An exchange that may stand between telling and asking: nothing in it concerns the user."""
    return draw(rng.choice((arithmetic.make, facts.make, sorting.make, smalltalk.make_greeting)), rng, "train")


def _memory(rng: Random) -> Sample:
    return memory.make(rng, _between)


TASKS: dict[str, Task] = {
    "smalltalk": Task(smalltalk.make, 1.3, examine=smalltalk.make),
    "arithmetic": Task(arithmetic.make, 3.4, examine=arithmetic.make),
    "facts": Task(facts.make, 2.0, examine=facts.make),
    "sorting": Task(sorting.make, 1.6, examine=sorting.make),
    "counting": Task(counting.make, 1.4, examine=counting.make),
    "reversing": Task(reversing.make, 1.3, examine=reversing.make),
    "recall": Task(recall.make_long, 0.22, chains=False, examine=recall.make_exam),
    "short recall": Task(recall.make_short, 0.5),
    "memory": Task(_memory, 1.0, examine=_memory),
    "unknown": Task(memory.make_unknown, 0.1, chains=False),
    "extraction": Task(extraction.make, 0.8, examine=extraction.make),
    "tools": Task(toolcalls.make, 1.0, chains=False, examine=toolcalls.make),
    "stories": Task(stories.make, 0.5, examine=stories.make),
    "functions": Task(functions.make, 0.8, examine=functions.make),
    "naming": Task(naming.make, 0.6, examine=naming.make),
    "limits": Task(limits.make, 1.2, examine=limits.make),
}

EXAMINED: tuple[str, ...] = tuple(name for name, task in TASKS.items() if task.examine is not None)
