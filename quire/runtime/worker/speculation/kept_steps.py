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

StepKey = tuple[int, ...]
"""What a step is known by: steps with the same key are alike. Empty: the host knows tokens of the step, so no other is
like it."""
_MAX_KEPT = 256
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
    """Keeps what was staged for steps, by their keys."""

    def __init__(self) -> None:
        self._steps: dict[StepKey, KeptStep] = {}

    def find(self, key: StepKey) -> KeptStep | None:
        """The step that is alike, if one was kept."""
        return self._steps.get(key)

    def keep(self, key: StepKey, step: KeptStep) -> None:
        """Keep a step with such a key, which is not empty."""
        if len(self._steps) >= _MAX_KEPT:
            self._steps.clear()
        self._steps[key] = step


def drafting_key(plan: Plan) -> StepKey:
    """The key of a draft model's step."""
    if any(token >= 0 for token in plan.tokens):
        return ()
    return (*plan.slots, -1, *plan.counts, -1, *plan.tokens, -1, *plan.sampled_rows)


def verified_key(plan: Plan, drafts: StepDrafts) -> StepKey:
    """The key of a step that verifies drafts."""
    if not drafts.on_device or plan.token_rows:
        return ()
    return (*plan.slots, -1, *plan.counts, -1, *plan.drafts, -1, *drafts.counts.tolist())
