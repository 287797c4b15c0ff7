"""What stands in the place of graphs where there is no card."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.worker.shapes import StepShape


class RunAgain:
    """What was recorded is run again: the same launches, on the columns of the day."""

    def __init__(self) -> None:
        self._steps: dict[StepShape, Callable[[], Tensor]] = {}
        self.replayed: list[StepShape] = []

    def record(self, shape: StepShape, forward: Callable[[], Tensor]) -> None:
        self._steps[shape] = forward

    def replay(self, shape: StepShape) -> Tensor:
        self.replayed.append(shape)
        logits = self._steps[shape]()
        assert len(logits) == shape.reads
        return logits
