"""Launches steps without drafts: replayed if they were captured, or kernel by kernel; then their tokens are sampled."""

from __future__ import annotations

from torch import Tensor

from quire.foundation.messages.workers import Plan, Result
from quire.runtime.worker.captured_steps import CapturedSteps
from quire.runtime.worker.forward_pass import ForwardPass
from quire.runtime.worker.graph_shapes import GraphShape
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.sampling.no_sampler import NoSampler
from quire.runtime.worker.sampling.prompt_logprobs import NO_PROMPT_LOGPROBS
from quire.runtime.worker.sampling.step_sampler import StepSampler
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.device_drafts import DeviceTokens
from quire.runtime.worker.step_handle import StepHandle, StepTimer
from quire.runtime.worker.step_stager import StepStager


class StepLauncher:
    """Launches the steps of a model.

    Args:
        slots: The slot table.
        stager: Stages them.
        captured: The steps that are replayed.
        forward: Runs the model.
        sampler: Samples.
        device_tokens: Is told what was sampled; None: nobody is.
    """

    def __init__(
        self,
        slots: SlotTable,
        stager: StepStager,
        captured: CapturedSteps,
        forward: ForwardPass,
        sampler: StepSampler | NoSampler,
        device_tokens: DeviceTokens | None,
    ) -> None:
        self._dummy = slots.dummy
        self._stager = stager
        self._captured = captured
        self._forward = forward
        self._sampler = sampler
        self._device_tokens = device_tokens

    def launch(self, plan: Plan, host: HostBatch, timer: StepTimer) -> StepHandle:
        """Launch a plan with these rows, whose slots were admitted."""
        if not plan.prompt_logprobs_rows and (shape := self._captured.shape_for(host)):
            return self._replay(plan, host, shape, timer)
        return self._run(plan, host, timer)

    def sample(self, logits: Tensor, sampled_slots: Tensor) -> None:
        """What a captured step does behind its logits, [sampled, vocab]."""
        self._sampler.sample(logits, sampled_slots)
        if self._device_tokens is not None:
            self._device_tokens.sampled(sampled_slots)

    def _replay(self, plan: Plan, host: HostBatch, shape: GraphShape, timer: StepTimer) -> StepHandle:
        """A captured step. Its graph samples for the dummy in place of late positions, which are sampled behind it; a
        recorded step can wait for bitmasks itself.
        """
        recorded = self._captured.recorded
        sampling = self._sampler.begin(plan.step, host.sampled_slots, host.masked, timer)
        if recorded is not None and self._sampler.needs_bitmasks_only(sampling):
            inputs = self._stager.stage(plan, host, None, shape)
            self._stager.apply(plan, inputs)
            logits = recorded.replay_logits(shape, adapted=inputs.adapted)
            return self._sampler.sample_masked(sampling, logits, recorded.sample)
        inputs = self._stager.stage(plan, host.padded_to(shape, self._dummy), sampling, shape)
        self._stager.apply(plan, inputs)
        logits = self._captured.replay(shape, adapted=inputs.adapted)
        if inputs.late is None:
            return self._sampler.finish(sampling, logits, NO_PROMPT_LOGPROBS)
        return self._sampler.sample_late(sampling, logits[: len(sampling.slots)], inputs.late, NO_PROMPT_LOGPROBS)

    def _run(self, plan: Plan, host: HostBatch, timer: StepTimer) -> StepHandle:
        """A step of any shape."""
        sampling = self._sampler.begin(plan.step, host.sampled_slots, host.masked, timer)
        inputs = self._stager.stage(plan, host, sampling)
        self._stager.apply(plan, inputs)
        hidden, prompts = self._forward.run(plan, host, inputs)
        if not plan.sampled_rows:
            return timer.stop(lambda ms: Result(plan.step, [], [], device_ms=ms, prompt_logprobs=prompts.collect()))
        logits = self._forward.logits(hidden, inputs)
        if not sampling.all_late:
            self.sample(logits, inputs.sampled_slots)
        if inputs.late is None:
            return self._sampler.finish(sampling, logits, prompts)
        return self._sampler.sample_late(sampling, logits, inputs.late, prompts)
