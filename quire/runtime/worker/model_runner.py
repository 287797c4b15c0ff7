"""Launches plans, and what runs before the first one; it puts together what a step goes through:

1. `step_stager.py`: what it takes from the host is staged, and the plan's changes are made.
2. `forward_pass.py`: hidden states and logits; or a step that was captured is replayed (`captured_steps.py`).
3. Tokens are sampled (`sampling/`), or drafts verified (`speculation/`).

`step_launcher.py` does this for steps without drafts, launchers in `speculation/` for others. On a GPU a
step is only launched; its outputs come back to the host by themselves, and nothing waits for the device but
`StepHandle.result`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.kernels.cpu.recording import Sizes
from quire.foundation.messages.workers import Plan, Result, TokenBitmasks
from quire.models.lora.step_tiles import Adapted
from quire.models.lora.updates import LowRankUpdates
from quire.models.model import Model
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.adapter_rows import AdapterRows
from quire.runtime.worker.batch import BatchBuffers
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.captured_steps import CapturedSteps
from quire.runtime.worker.forward_pass import ForwardPass
from quire.runtime.worker.graph_shapes import MAX_ROWS, MAX_SHORT_TOKENS, GraphShapes, ShortSteps, StepKind
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.kv_transfer import BlockTransfer
from quire.runtime.worker.recorded_steps import record_steps
from quire.runtime.worker.sampling.logprobs import LogprobsMode
from quire.runtime.worker.sampling.no_sampler import NoSampler
from quire.runtime.worker.sampling.prompt_logprobs import PromptLogprobs
from quire.runtime.worker.sampling.sampler import Deferred
from quire.runtime.worker.sampling.step_sampler import StepSampler
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.device_drafts import DeviceTokens, DraftsToVerify
from quire.runtime.worker.speculation.device_verification import DeviceVerifier
from quire.runtime.worker.speculation.drafting_launcher import DraftingLauncher
from quire.runtime.worker.speculation.hidden_states import StepStates
from quire.runtime.worker.speculation.step_drafts import StepDrafts
from quire.runtime.worker.speculation.synthetic_acceptance import SyntheticAcceptance
from quire.runtime.worker.speculation.verification import Verifier
from quire.runtime.worker.speculation.verification_launcher import (
    DeviceVerificationLauncher,
    VerificationLauncher,
)
from quire.runtime.worker.stage_steps import WHOLE_MODEL, StageSteps
from quire.runtime.worker.staging_buffer import StagingBuffer
from quire.runtime.worker.step_handle import MaskedStepHandle, StepHandle, StepTimers
from quire.runtime.worker.step_inputs import StepInputs
from quire.runtime.worker.step_launcher import StepLauncher
from quire.runtime.worker.step_stager import EMPTY_PLAN, StepStager
from quire.runtime.worker.steps_in_flight import MAX_STEPS_IN_FLIGHT

_STAGED_ENTRIES = 10
"""Entries of the staging buffer for each row and each token: what a step's columns take at most, apart from changes of
block tables and moves of blocks, which are uploaded by themselves where they find no room.
"""
_TILE_ENTRIES = 19
"""Further entries of the staging buffer for each row and each token where there are adapters: for their tiles, and for
the slots of those that change experts."""


class ModelRunner:
    """Launches plans in order. The slot table is the only thing that lives from one step to the next.

    Args:
        model: With its weights.
        attention: Over the KV cache.
        transfer: Of its blocks.
        slots: The slot table.
        limits: What buffers are made for.
        by_length: Whether the model's rope depends on a sequence's length.
        logprobs_mode: What is reported of sampled tokens.
        max_logprobs: How many tokens a request may have reported beside one; -1 for all.
        updates: What adapters change of the model; None: there are none.
        states: Is told of each step before its model runs; None: nobody is.
        stages: What the other stages of a pipeline are told.
        synthetic: See Verifier.
        device_tokens: See BatchBuffers; None: those of a model whose drafts are verified, if there are drafts.
        in_flight: Steps that may be launched before the oldest one is done.

    Attributes:
        slots: The slot table.
        runs_ahead: Whether steps are only launched, and the host may not know what they sample.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        transfer: BlockTransfer,
        slots: SlotTable,
        limits: StepLimits,
        by_length: bool = False,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        max_logprobs: int = 20,
        updates: LowRankUpdates | None = None,
        states: StepStates | None = None,
        stages: StageSteps = WHOLE_MODEL,
        synthetic: SyntheticAcceptance | None = None,
        device_tokens: DeviceTokens | None = None,
        in_flight: int = MAX_STEPS_IN_FLIGHT,
    ) -> None:
        rows, most = max(limits.rows, MAX_ROWS), max(limits.sampled, MAX_SHORT_TOKENS)
        ring = BufferRing(slots.device, in_flight)
        self.runs_ahead = ring.has_device_memory
        verifies = limits.drafts > 0 and self.runs_ahead
        if verifies:
            device_tokens = DraftsToVerify(slots)
        short = ShortSteps.NONE
        if device_tokens is not None:
            short = ShortSteps.VERIFYING if verifies else ShortSteps.DRAFTING
        adapters = None if updates is None else AdapterRows(updates, on_gpu=slots.device.type != "cpu")
        entries = _STAGED_ENTRIES + (0 if updates is None else _TILE_ENTRIES)
        batches = BatchBuffers(slots, rows, limits.tokens, by_length, device_tokens)

        self._model = model
        self.slots = slots
        self._limits = limits
        self._stages = stages
        self._device_tokens = device_tokens
        self._max_logprobs = slots.vocab_size if max_logprobs < 0 else min(max_logprobs, slots.vocab_size)
        self._kinds = (Adapted.NOTHING,) if adapters is None else adapters.recorded
        self._ring = ring
        self._staging = StagingBuffer(entries * (rows + limits.tokens), ring)
        self._stager = StepStager(self._staging, slots, transfer, attention, adapters, stages, verifies=verifies)
        self._captured = CapturedSteps(slots, adapters, short)
        self._prompt_logprobs = PromptLogprobs(model, slots)
        self._forward = ForwardPass(
            slots.device, model, attention, self._staging, batches, self._prompt_logprobs, adapters, states, stages
        )
        self._sampler = _build_sampler(model, slots, limits, logprobs_mode, ring, stages)
        self._timers = StepTimers(slots.device, in_flight)
        parts = slots, self._stager, self._captured
        self._launcher = StepLauncher(*parts, self._forward, self._sampler, device_tokens)
        self._drafting = DraftingLauncher(*parts, self._launcher, self._timers)
        self._device_verifier: DeviceVerifier | None = None
        self._verification: VerificationLauncher | DeviceVerificationLauncher
        bitmasks, outputs = self._sampler.bitmasks, self._sampler.outputs
        if verifies:
            verifier = DeviceVerifier(slots, most, logprobs_mode, bitmasks, outputs, synthetic)
            self._device_verifier = verifier
            self._verification = DeviceVerificationLauncher(*parts, self._forward, verifier, keeps=adapters is None)
        else:
            on_host = Verifier(slots, logprobs_mode, bitmasks, synthetic)
            self._verification = VerificationLauncher(*parts, self._forward, on_host)
        self._masked_step: MaskedStepHandle | None = None

    # --- start ------------------------------------------------------------------------------------------------------

    def run_largest(self, deferred: Deferred = nullcontext) -> None:
        """Run the steps that take most memory, on rows of the dummy: most tokens with most sampled positions, and steps
        of a token a row, which may run kernels of their own. `deferred`: see `run_dummies`.
        """
        self.run_dummies(self._limits.fewest_rows(self._limits.tokens), deferred)
        for rows in sorted({1, self._limits.rows}):
            self.run_dummies([1] * rows, deferred)

    def capture_graphs(self, most: int, *, precompiled: bool = False) -> None:
        """Capture steps of up to `most` tokens. Then a step of one token more runs, so that whatever is made at the
        first launch of its kind makes no request wait.

        Args:
            most: See above.
            precompiled: Whether all kernels of these steps are compiled and loaded, or will be by others. Then only the
                largest step of each kind runs before it is captured, for what Triton and torch make at a first launch.
        """
        limits, dummy = self._limits, self.slots.dummy
        shapes = GraphShapes(most, limits.rows, limits.tokens, limits.length, limits.sampled, self._captured.short)
        ran: set[tuple[StepKind, Adapted]] = set()
        with torch.inference_mode():
            for shape, adapted in product(shapes.all(), self._kinds):
                host = HostBatch.of_dummy(dummy, [1 if shape.is_decode else 2]).padded_to(shape, dummy)
                inputs = self._stager.stage(EMPTY_PLAN, host, shape=shape, adapted=adapted)
                assert not self._staging.overflowed
                step = partial(self._forward_and_sample, host, inputs)
                if not precompiled or (shape.kind, adapted) not in ran or shape.kind is StepKind.SHORT:
                    step()
                else:
                    self._staging.copy_to_device()  # every staged step copies its inputs; see BufferRing
                ran.add((shape.kind, adapted))
                self._captured.graphs.capture(shape, step, adapted=adapted)
        self._captured.shapes = shapes
        self.run_dummies(limits.fewest_rows(most + 1), sample=False)

    def record_steps(self) -> None:
        """Record small steps on a device whose memory is the host's, if kernels of ours compute all of them."""
        if self.runs_ahead:
            return

        def step(adapted: Adapted, sizes: Sizes) -> Callable[[], Tensor]:
            counts = [sizes.tokens - sizes.rows + 1, *[1] * (sizes.rows - 1)]
            host = HostBatch.of_dummy(self.slots.dummy, counts, sizes.sampled)
            return partial(self._forward_and_sample, host, self._stager.stage(EMPTY_PLAN, host, adapted=adapted))

        with torch.inference_mode():
            self._captured.recorded = record_steps(step, self._kinds, self._limits.rows, self._limits.sampled)

    def run_dummies(self, counts: Sequence[int], deferred: Deferred = nullcontext, *, sample: bool = True) -> None:
        """Run a step of rows of the dummy.

        Args:
            counts: Tokens of each row.
            deferred: Within it is launched what only some requests need.
            sample: Whether all that may be sampled and reported is run too, for as many sampled positions and prompt
                positions as a step can have.
        """
        rows, positions = self._limits.rows, self._prompt_logprobs.positions
        verified = 0 if self._device_verifier is None else self._limits.sampled
        with torch.inference_mode():
            self.slots.init_dummy()
            self._stages.await_tokens(EMPTY_PLAN, self.slots.last_token)
            host = HostBatch.of_dummy(self.slots.dummy, counts)
            for adapted in self._kinds:
                self._ring.await_device()  # nobody takes their results, and they may be more than buffers
                _, hidden = self._forward.batch_and_hidden(host, self._stager.stage(EMPTY_PLAN, host, adapted=adapted))
            logits = self._model.logits(hidden[: max(rows, positions, verified)].clone())
            if sample:
                if self._device_tokens is not None:
                    self._device_tokens.sampled(torch.full_like(self.slots.length[:1], self.slots.dummy))
                if self._device_verifier is not None:
                    self._device_verifier.warm_up(logits[:verified])
                self._sampler.warm_up(logits[:rows], deferred, self._max_logprobs)
                self._prompt_logprobs.warm_up(logits[:positions], self._max_logprobs)

    # --- steps ------------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan, drafts: StepDrafts | None = None) -> StepHandle:
        """Apply the plan's changes, move its rows forward and sample their tokens. Masked rows are sampled once
        `submit_bitmasks` has brought their bitmasks, which happens before the next plan is launched.

        Args:
            plan: The step.
            drafts: What was proposed for it, if it has drafts.
        """
        assert self._masked_step is None, "a step waits for its bitmasks"
        timer = self._timers.start()
        with torch.inference_mode():
            self.slots.admit(plan.admitted)
            if not plan.slots:
                self._stager.apply_changes(plan)
                return timer.stop(lambda ms: Result(plan.step, [], [], device_ms=ms))
            if drafts:
                handle = self._verification.launch(plan, drafts, timer)
            else:
                handle = self._launcher.launch(plan, HostBatch.of(plan, self.slots.host.max_lengths, drafts), timer)
        if isinstance(handle, MaskedStepHandle):
            self._masked_step = handle
        return handle

    def launch_drafting(self, plan: Plan, times: int = 1) -> None:
        """Launch a plan of a draft model; see DraftingLauncher."""
        with torch.inference_mode():
            self._drafting.launch(plan, times)

    def rewind(self, slots: Sequence[int], lengths: Sequence[int], num_sampled: Sequence[int]) -> None:
        """Set slots to these lengths, and to these numbers of sampled tokens."""
        self.slots.rewind(slots, lengths, num_sampled)

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        """Hand over the bitmasks of the plan that was launched last."""
        assert self._masked_step is not None, "no step waits for bitmasks"
        step, self._masked_step = self._masked_step, None
        step.submit_bitmasks(masks)

    def _forward_and_sample(self, host: HostBatch, inputs: StepInputs) -> Tensor:
        """What a captured graph does; returns [sampled, vocab] logits."""
        _, hidden = self._forward.batch_and_hidden(host, inputs)
        logits = self._forward.logits(hidden, inputs)
        if inputs.drafts is None:
            self._launcher.sample(logits, inputs.sampled_slots)
        else:
            assert self._device_verifier is not None
            self._device_verifier.verify_at_once(logits, inputs.sampled_slots, inputs.drafts)
        return logits


def _build_sampler(
    model: Model, slots: SlotTable, limits: StepLimits, mode: LogprobsMode, ring: BufferRing, stages: StageSteps
) -> StepSampler | NoSampler:
    """Build what ends the steps of this model: a sampler, or what stands for one if the model has no logits."""
    if not model.has_logits:
        return NoSampler(slots, mode, ring)
    most = max(limits.sampled, MAX_SHORT_TOKENS)
    verified = max(limits.rows, MAX_SHORT_TOKENS) if limits.drafts else 0
    return StepSampler(slots, max(limits.rows, most), mode, ring, most, partial(_send_tokens, stages, slots), verified)


def _send_tokens(stages: StageSteps, slots: SlotTable, step: int) -> None:
    stages.send_tokens(step, slots.last_token)
