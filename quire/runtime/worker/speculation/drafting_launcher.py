"""Launches the steps by which a draft model proposes, on a device that runs ahead of the host: nobody waits for them,
and nobody but the device is told what they sample.
"""

from __future__ import annotations

from quire.foundation.messages.workers import Plan
from quire.runtime.worker.captured_steps import CapturedSteps
from quire.runtime.worker.graph_shapes import GraphShape, StepKind
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.kept_steps import KeptStep, KeptSteps, drafting_key
from quire.runtime.worker.step_handle import StepTimers
from quire.runtime.worker.step_launcher import StepLauncher
from quire.runtime.worker.step_stager import EMPTY_PLAN, StepStager


class DraftingLauncher:
    """Launches the steps of a draft model.

    Args:
        slots: The slot table.
        stager: Stages steps.
        captured: The steps that are replayed.
        steps: Launches all others.
        timers: Of steps.
    """

    def __init__(
        self, slots: SlotTable, stager: StepStager, captured: CapturedSteps, steps: StepLauncher, timers: StepTimers
    ) -> None:
        self._slots = slots
        self._stager = stager
        self._captured = captured
        self._steps = steps
        self._timers = timers
        self._kept = KeptSteps()

    def launch(self, plan: Plan, times: int) -> None:
        """Launch a plan without new owners of slots this many times; from the second time on, each row goes on with the
        token that it has sampled."""
        key, launched = drafting_key(plan), 0
        if (kept := self._kept.find(key)) is None:
            host = HostBatch.of(plan, self._slots.host.max_lengths)
            shape = self._captured.shape_for(host)
            if not key or shape is None or not (shape.is_decode or shape.kind is StepKind.SHORT):
                for _ in range(times):
                    self._steps.launch(plan, host, self._timers.start())
                return
            kept, launched = self._launch_first(plan, host, shape), 1
            self._kept.keep(key, kept)
        for number in range(launched, times):
            self._stager.stage_alike(EMPTY_PLAN if number else plan, kept.columns)
            self._captured.graphs.replay(kept.shape)

    def _launch_first(self, plan: Plan, host: HostBatch, shape: GraphShape) -> KeptStep:
        """Launch a plan, and return what was staged for it, by which others that are alike can be launched."""
        self._stager.apply(plan, self._stager.stage(plan, host.padded_to(shape, self._slots.dummy), shape=shape))
        self._captured.graphs.replay(shape)
        return KeptStep(host, shape, self._stager.copied_columns)
