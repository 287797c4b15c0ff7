"""The draft model's worker, whose steps are launched one behind another on the stream of the model's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.messages import Plan, Result
from quire.worker.pipeline_depth import MAX_STEPS_IN_FLIGHT
from quire.worker.step_handle import StepHandle


class LaunchesSteps(Protocol):
    """A Worker."""

    def launch(self, plan: Plan) -> StepHandle:
        """See Worker."""
        ...

    def finish(self, step: StepHandle) -> Result:
        """See Worker."""
        ...

    def rewind(self, slots: Sequence[int], lengths: Sequence[int], num_sampled: Sequence[int]) -> None:
        """See Worker."""
        ...


class DraftSteps:
    """A DraftWorker. A row's next token is in the slot table, so no step waits for the results of those before.

    Args:
        worker: Loaded. No more than MAX_STEPS_IN_FLIGHT of its steps are in flight.
    """

    def __init__(self, worker: LaunchesSteps) -> None:
        self._worker = worker
        self._changes: deque[StepHandle] = deque()  # that may still run

    def change(self, plan: Plan) -> None:
        self._make_room(0)
        self._changes.append(self._worker.launch(plan))

    def rewind(self, slots: Sequence[int], lengths: Sequence[int], num_sampled: Sequence[int]) -> None:
        """See DraftWorker."""
        self._worker.rewind(slots, lengths, num_sampled)

    def execute_all(self, plans: Iterable[Plan]) -> list[Result]:
        results: list[Result] = []
        launched: deque[StepHandle] = deque()
        for plan in plans:
            if len(launched) == MAX_STEPS_IN_FLIGHT:
                results.append(self._worker.finish(launched.popleft()))
            self._make_room(len(launched))
            launched.append(self._worker.launch(plan))
        return results + [self._worker.finish(step) for step in launched]

    def _make_room(self, others: int) -> None:
        """For a step beside so many others."""
        while len(self._changes) + others >= MAX_STEPS_IN_FLIGHT:
            self._changes.popleft().wait()
