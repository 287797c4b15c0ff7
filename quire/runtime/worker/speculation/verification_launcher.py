"""Launches steps with drafts, whose tokens are sampled behind all positions: where the host verifies, and on a device
that runs ahead of it.
"""

from __future__ import annotations

from quire.foundation.messages.workers import Plan
from quire.runtime.worker.captured_steps import CapturedSteps
from quire.runtime.worker.forward_pass import ForwardPass
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.sampling.prompt_logprobs import NO_PROMPT_LOGPROBS
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.device_verification import DeviceVerifier
from quire.runtime.worker.speculation.kept_steps import KeptStep, KeptSteps, verified_key
from quire.runtime.worker.speculation.step_drafts import StepDrafts
from quire.runtime.worker.speculation.verification import Verification, Verifier
from quire.runtime.worker.step_handle import StepHandle, StepTimer
from quire.runtime.worker.step_stager import StepStager


class VerificationLauncher:
    """Launches steps whose drafts the host verifies.

    Args:
        slots: The slot table.
        stager: Stages steps.
        captured: The steps that are replayed.
        forward: Runs the model.
        verifier: Verifies.
    """

    def __init__(
        self, slots: SlotTable, stager: StepStager, captured: CapturedSteps, forward: ForwardPass, verifier: Verifier
    ) -> None:
        self._slots = slots
        self._stager = stager
        self._captured = captured
        self._forward = forward
        self._verifier = verifier

    def launch(self, plan: Plan, drafts: StepDrafts, timer: StepTimer) -> StepHandle:
        """Launch a plan whose slots were admitted; the host verifies its drafts."""
        host = HostBatch.of(plan, self._slots.host.max_lengths, drafts)
        verification = Verification(plan.step, drafts, host.sampled_slots, host.masked, timer)
        recorded = self._captured.recorded
        shape = None if plan.prompt_logprobs_rows or recorded is None else self._captured.shape_for(host)
        inputs, prompts = self._stager.stage(plan, host), NO_PROMPT_LOGPROBS
        self._stager.apply(plan, inputs)
        if shape is not None and recorded is not None:
            logits = recorded.replay_logits(shape, adapted=inputs.adapted)
        else:
            hidden, prompts = self._forward.run(plan, host, inputs)
            logits = self._forward.logits(hidden, inputs)
        return self._verifier.verify(verification, logits, prompts)


class DeviceVerificationLauncher:
    """Launches steps whose drafts the device verifies by itself.

    Args:
        slots, stager, captured, forward: See VerificationLauncher.
        verifier: Verifies.
        keeps: Whether what was staged for a step is kept, and used again for others that are alike.
    """

    def __init__(
        self,
        slots: SlotTable,
        stager: StepStager,
        captured: CapturedSteps,
        forward: ForwardPass,
        verifier: DeviceVerifier,
        *,
        keeps: bool,
    ) -> None:
        self._slots = slots
        self._stager = stager
        self._captured = captured
        self._forward = forward
        self._verifier = verifier
        self._keeps = keeps
        self._kept = KeptSteps()

    def launch(self, plan: Plan, drafts: StepDrafts, timer: StepTimer) -> StepHandle:
        """Launch a plan whose slots were admitted; the device verifies its drafts. What was staged for a step that is
        alike is used again."""
        if (kept := self._kept.find(verified_key(plan, drafts))) is not None:
            verification = Verification(plan.step, drafts, kept.host.sampled_slots, kept.host.masked, timer)
            if not (plan.masked or plan.prompt_logprobs_rows or self._verifier.needs_host(verification)):
                return self._launch_alike(plan, kept, verification)
        host = HostBatch.of(plan, self._slots.host.max_lengths, drafts)
        return self._launch(plan, host, Verification(plan.step, drafts, host.sampled_slots, host.masked, timer))

    def _launch(self, plan: Plan, host: HostBatch, verification: Verification) -> StepHandle:
        """The graph of a short step verifies, if that needs nothing of the host; any other one samples for the dummy in
        place of all positions."""
        drafts, verifier, prompts = verification.drafts, self._verifier, NO_PROMPT_LOGPROBS
        shape = None if plan.prompt_logprobs_rows else self._captured.shape_of_drafts(host)
        padded = host if shape is None else host.padded_to(shape, self._slots.dummy)
        at_once = padded.is_short and not verifier.needs_host(verification)
        inputs = self._stager.stage(
            plan, padded, None if at_once else verification, shape, drafts=drafts if at_once else None
        )
        self._stager.apply(plan, inputs)
        if shape is not None:
            if at_once and self._keeps and (key := verified_key(plan, drafts)):
                self._kept.keep(key, KeptStep(host, shape, self._stager.copied_columns))
            logits = self._captured.graphs.replay(shape, adapted=inputs.adapted)
            if at_once:
                return verifier.finish(verification, logits, shape.sampled, prompts)
            logits = logits[: len(verification.slots)]
        else:
            hidden, prompts = self._forward.run(plan, host, inputs)
            logits = self._forward.logits(hidden, inputs)
        assert inputs.late is not None, "each sampled row has a position"
        return verifier.verify(verification, logits, inputs.late, prompts)

    def _launch_alike(self, plan: Plan, kept: KeptStep, verification: Verification) -> StepHandle:
        """Launch a step with what was staged for another one that is alike."""
        self._slots.host.max_lengths[kept.host.slots] += kept.host.counts
        self._stager.stage_alike(plan, kept.columns)
        logits = self._captured.graphs.replay(kept.shape)
        return self._verifier.finish(verification, logits, kept.shape.sampled, NO_PROMPT_LOGPROBS)
