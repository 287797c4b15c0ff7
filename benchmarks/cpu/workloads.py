"""What is asked of every engine: numbers of tokens in and out, and the figures that follow from the seconds.

Knows nothing about engines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_RUNNING = 16
"""Sequences that an engine may serve at the same time."""
Seconds = Callable[[Sequence[int], Sequence[int]], float]
"""How long an engine takes for prompts of these lengths and outputs of those."""


@dataclass(frozen=True)
class Workload:
    """Requests that are sent at once.

    Attributes:
        name: For tables and the command line.
        inputs, outputs: Tokens of each request.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def measure(self, seconds: Seconds) -> dict[str, float]:
        """Figures by name, all in tokens a second."""
        if len(self.inputs) > 1:
            return {f"{self.name} out": sum(self.outputs) / seconds(self.inputs, self.outputs)}
        first = seconds(self.inputs, (1,))
        whole = seconds(self.inputs, self.outputs)
        return {
            f"{self.name} prefill": self.inputs[0] / first,
            f"{self.name} decode": (self.outputs[0] - 1) / (whole - first),
            f"{self.name} out": self.outputs[0] / whole,
        }


def workloads() -> dict[str, Workload]:
    """All, by name. `batch=…` are only points of the picture; W1 and W2 are its first and last. W3/2
    is the first half of W3, for who has little time."""
    drawn = random.Random(0)
    inputs = tuple(drawn.randint(32, 512) for _ in range(64))
    outputs = tuple(drawn.randint(32, 256) for _ in range(64))
    batches = [Workload(f"batch={n}", (128,) * n, (128,) * n) for n in (2, 4, 8)]
    every = [
        Workload("W1", (128,), (128,)),
        *batches,
        Workload("W2", (128,) * 16, (128,) * 16),
        Workload("W3", inputs, outputs),
        Workload("W3/2", inputs[:32], outputs[:32]),
    ]
    return {workload.name: workload for workload in every}


BATCH_OF = {"W1 out": 1, "batch=2 out": 2, "batch=4 out": 4, "batch=8 out": 8, "W2 out": 16}
"""The picture's points: figures by the number of requests."""
