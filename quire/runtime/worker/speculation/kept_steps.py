"""What the host has staged for steps, kept for others that are alike.

Where tokens stay on the device, steps of the same rows differ in nothing that the host knows: a draft model's, and
those that verify its drafts.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.compute.attention.metadata import IntArray
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.graph_shapes import GraphShape
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.speculation.step_drafts import StepDrafts

Rows = tuple[int, ...]
"""What a step is known by: steps with the same rows are alike. Empty: the host knows tokens of the step, so no other is
like it."""
_MOST_KEPT = 256
"""Steps that are kept, at most. As long as the same sequences run, few steps differ."""


class KeptStep(NamedTuple):
    """What was staged for a step.

    Attributes:
        host: Its rows; `max_lengths` is not true any more.
        shape: The captured shape that it is padded to.
        columns: What is copied to the device.
    """

    host: HostBatch
    shape: GraphShape
    columns: IntArray


class KeptSteps:
    """Keeps what was staged for steps, by their rows."""

    def __init__(self) -> None:
        self._steps: dict[Rows, KeptStep] = {}

    def find(self, rows: Rows) -> KeptStep | None:
        """The step that is alike, if one was kept."""
        return self._steps.get(rows)

    def keep(self, rows: Rows, step: KeptStep) -> None:
        """Keep a step with such rows, which are not empty."""
        if len(self._steps) >= _MOST_KEPT:
            self._steps.clear()
        self._steps[rows] = step


def drafting_rows(plan: Plan) -> Rows:
    """The rows that a draft model's step is known by."""
    if any(token >= 0 for token in plan.tokens):
        return ()
    return (*plan.slots, -1, *plan.counts, -1, *plan.tokens, -1, *plan.sampled_rows)


def verified_rows(plan: Plan, drafts: StepDrafts) -> Rows:
    """The rows that a step which verifies drafts is known by."""
    if not drafts.on_device or plan.token_rows:
        return ()
    return (*plan.slots, -1, *plan.counts, -1, *plan.drafts, -1, *drafts.counts.tolist())
