"""What the host has staged for a step, kept for others that are alike.

Where tokens stay on the device, steps of the same rows differ in nothing that the host knows: a draft model's, and
those that verify its drafts.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.attention.metadata import IntArray
from quire.worker.graph_shapes import GraphShape
from quire.worker.host_batch import HostBatch
from quire.worker.speculation.step_drafts import StepDrafts
from quire.worker.speculation.verification import Verification
from quire.worker.step_handle import StepTimer


class KeptStep(NamedTuple):
    """A step.

    Attributes:
        host: Its rows; `max_lengths` is not true any more.
        shape: The captured shape that it is padded to.
        columns: What is copied to the device.
        drafts: Those that are verified; None: it verifies none.
    """

    host: HostBatch
    shape: GraphShape
    columns: IntArray
    drafts: StepDrafts | None = None

    def verification(self, step: int, timer: StepTimer) -> Verification:
        """Of step `step`, which is alike."""
        assert self.drafts is not None, "a step without drafts"
        return Verification(step, self.drafts, self.host.sampled_slots, self.host.masked, timer)
