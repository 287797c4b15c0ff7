"""One step: a Plan to a batch, hidden states, logits of sampled positions, tokens, and a Result.

On a GPU a step is only launched; its outputs come back to the host by themselves, and nothing waits for the device but
`StepHandle.result`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.attention.metadata import AttentionMetadata, IntArray
from quire.errors import ConfigError
from quire.kernels.cpu.recording import Sizes
from quire.kernels.dispatch import kernel
from quire.kernels.reference.lora import Tiles
from quire.lora.step_tiles import Adapted
from quire.lora.updates import LowRankUpdates
from quire.messages import Plan, Result, TokenBitmasks
from quire.models.model import Model
from quire.planning.step_limits import StepLimits
from quire.worker.adapter_rows import AdapterRows
from quire.worker.batch import Batch, BatchBuffers
from quire.worker.buffer_ring import BufferRing
from quire.worker.cuda_graphs import CudaGraphs
from quire.worker.graph_shapes import MOST_ROWS, MOST_SHORT_TOKENS, GraphShape, GraphShapes, StepKind
from quire.worker.host_batch import HostBatch
from quire.worker.kept_step import KeptStep
from quire.worker.kv_transfer import BlockTransfer
from quire.worker.pipeline_depth import MAX_STEPS_IN_FLIGHT
from quire.worker.recorded_steps import RecordedSteps, record_steps
from quire.worker.sampling.logprobs import LogprobsMode
from quire.worker.sampling.no_sampler import NoSampler
from quire.worker.sampling.prompt_logprobs import NO_PROMPT_LOGPROBS, PromptLogprobs, StepPromptLogprobs
from quire.worker.sampling.sampler import Deferred
from quire.worker.sampling.step_sampler import StepSampler, StepSampling
from quire.worker.slot_table import SlotTable
from quire.worker.speculation.device_drafts import DeviceTokens, DraftsToVerify
from quire.worker.speculation.device_verification import DeviceVerifier
from quire.worker.speculation.draft_columns import DraftColumns, padded_columns
from quire.worker.speculation.hidden_states import StepStates
from quire.worker.speculation.step_drafts import StepDrafts
from quire.worker.speculation.synthetic_acceptance import SyntheticAcceptance
from quire.worker.speculation.verification import Verification, Verifier
from quire.worker.stage_steps import WHOLE_MODEL, StageSteps
from quire.worker.staging_buffer import StagingBuffer
from quire.worker.step_handle import MaskedStepHandle, StepHandle, StepTimer, StepTimers
from quire.worker.step_inputs import StepInputs

_EMPTY_PLAN = Plan(0, [], [], [], [], [], [], [], [], [], [])
_STAGED_ENTRIES = 10
"""Entries of the staging buffer for each row and each token: what a step's columns take at most, apart from changes of
block tables and moves of blocks, which are uploaded by themselves where they find no room.
"""
_TILE_ENTRIES = 19
"""The same of tiles of adapters, and of those that change experts."""
_MOST_KEPT = 256
"""Steps of drafts that are kept: as long as the same sequences run, there are few that differ."""


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
        if logprobs_mode not in get_args(LogprobsMode):
            modes = ", ".join(get_args(LogprobsMode))
            raise ConfigError(f"--logprobs-mode {logprobs_mode} is not one of {modes}.", param="logprobs_mode")
        self._model = model
        self._attention = attention
        self._transfer = transfer
        self._slots = slots
        self._limits = limits
        self._states = states
        self._stages = stages
        self._max_logprobs = slots.vocab_size if max_logprobs < 0 else min(max_logprobs, slots.vocab_size)
        rows, ring = max(limits.rows, MOST_ROWS), BufferRing(slots.device, in_flight)
        self._ring = ring
        on_gpu = slots.device.type != "cpu"
        self._adapters = None if updates is None else AdapterRows(updates, on_gpu=on_gpu)
        self._kinds = (Adapted.NOTHING,) if self._adapters is None else self._adapters.recorded
        entries = _STAGED_ENTRIES + (0 if updates is None else _TILE_ENTRIES)
        self._staging = StagingBuffer(entries * (rows + limits.tokens), ring)
        if limits.drafts and ring.has_device_memory:
            device_tokens = DraftsToVerify(slots)
        self._device_tokens = device_tokens
        self._batches = BatchBuffers(slots, rows, limits.tokens, by_length, device_tokens)
        self._shapes = GraphShapes(0, 0, 0, 0)
        self._graphs = CudaGraphs()
        self._recorded: RecordedSteps | None = None
        self._take_rows = kernel("take_rows", slots.device.type)
        most = max(limits.sampled, MOST_SHORT_TOKENS)
        self._sampler = _build_sampler(model, slots, limits, logprobs_mode, ring, stages)
        self._verifier = Verifier(slots, logprobs_mode, self._sampler.bitmasks, synthetic)
        self._device_verifier: DeviceVerifier | None = None
        if limits.drafts and ring.has_device_memory:
            buffers = self._sampler.bitmasks, self._sampler.outputs
            self._device_verifier = DeviceVerifier(slots, most, logprobs_mode, *buffers, synthetic)
        self._short = 0  # see GraphShapes: a draft model's rows of several tokens sample the last one's next
        if device_tokens is not None:
            self._short = 2 if self._device_verifier is None else 1
        self._kept: dict[tuple[int, ...], KeptStep] = {}
        self._prompt_logprobs = PromptLogprobs(model, slots.vocab_size)
        self._timers = StepTimers(slots.device, in_flight)
        self._masked_step: MaskedStepHandle | None = None

    @property
    def runs_ahead(self) -> bool:
        """Whether steps are only launched, and the host may not know what they sample."""
        return self._ring.has_device_memory

    # --- start ------------------------------------------------------------------------------------------------------

    def run_largest(self, deferred: Deferred = nullcontext) -> None:
        """Run the steps that take most memory, on rows of the dummy: most tokens with most sampled positions, and steps
        of a token a row, which may run kernels of their own. `deferred`: see `run_dummies`.
        """
        self.run_dummies(self._limits.fewest_rows(self._limits.tokens), deferred)
        for rows in {1, self._limits.rows}:
            self.run_dummies([1] * rows, deferred)

    def capture_graphs(self, most: int, *, precompiled: bool = False) -> None:
        """Capture steps of up to `most` tokens. Then a step of one token more runs, so that whatever is made at the
        first launch of its kind makes no request wait.

        Args:
            most: See above.
            precompiled: Whether all kernels of these steps are compiled and loaded, or will be by others. Then only the
                largest step of each kind runs before it is captured, for what Triton and torch make at a first launch.
        """
        limits, dummy = self._limits, self._slots.dummy
        shapes = GraphShapes(most, limits.rows, limits.tokens, limits.length, limits.sampled, self._short)
        ran: set[tuple[StepKind, Adapted]] = set()
        with torch.inference_mode():
            for shape, adapted in product(shapes.all(), self._kinds):
                host = HostBatch.of_dummy(dummy, [1 if shape.is_decode else 2]).padded_to(shape, dummy)
                inputs = self._stage(_EMPTY_PLAN, host, shape=shape, adapted=adapted)
                assert not self._staging.overflowed
                step = partial(self._forward_and_sample, host, inputs)
                if not precompiled or (shape.kind, adapted) not in ran or shape.kind is StepKind.SHORT:
                    step()
                else:
                    self._staging.copy_to_device()  # every staged step copies its inputs; see BufferRing
                ran.add((shape.kind, adapted))
                self._graphs.capture(shape, step, adapted=adapted)
        self._shapes = shapes
        self.run_dummies(limits.fewest_rows(most + 1), sample=False)

    def record_steps(self) -> None:
        """On a device whose memory is the host's: record small steps, if kernels of ours compute all of them."""
        if self._ring.has_device_memory:
            return

        def step(adapted: Adapted, sizes: Sizes) -> Callable[[], Tensor]:
            counts = [sizes.tokens - sizes.rows + 1, *[1] * (sizes.rows - 1)]
            host = HostBatch.of_dummy(self._slots.dummy, counts, sizes.sampled)
            return partial(self._forward_and_sample, host, self._stage(_EMPTY_PLAN, host, adapted=adapted))

        with torch.inference_mode():
            self._recorded = record_steps(step, self._kinds, self._limits.rows, self._limits.sampled)

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
            self._slots.init_dummy()
            self._stages.await_tokens(_EMPTY_PLAN, self._slots.last_token)
            host = HostBatch.of_dummy(self._slots.dummy, counts)
            for adapted in self._kinds:
                _, hidden = self._forward(host, self._stage(_EMPTY_PLAN, host, adapted=adapted))
            logits = self._model.logits(hidden[: max(rows, positions, verified)].clone())
            if sample:
                if self._device_tokens is not None:
                    self._device_tokens.sampled(torch.full_like(self._slots.length[:1], self._slots.dummy))
                if self._device_verifier is not None:
                    self._device_verifier.warm_up(logits[:verified])
                self._sampler.warm_up(logits[:rows], deferred, self._max_logprobs)
                self._prompt_logprobs.warm_up(logits[:positions], self._max_logprobs)

    # --- steps ------------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan, drafts: StepDrafts | None = None) -> StepHandle:
        """Apply the plan's changes, move its rows forward, sample their tokens; those of masked rows once
        `submit_bitmasks` has brought their bitmasks, before the next plan is launched.

        Args:
            plan: The step.
            drafts: What was proposed for it, if it has drafts.
        """
        assert self._masked_step is None, "a step waits for its bitmasks"
        timer = self._timers.start()
        with torch.inference_mode():
            self._slots.admit(plan.admitted)
            if not plan.slots:
                return self._launch_changes(plan, timer)
            if drafts and (kept := self._kept.get(_verified_rows(plan, drafts))) is not None:
                assert self._device_verifier is not None
                verification = kept.verification(plan.step, timer)
                if not (plan.masked or plan.prompt_logprobs_rows or self._device_verifier.needs_host(verification)):
                    return self._verify_alike(plan, kept, verification, self._device_verifier)
            host = HostBatch.of(plan, self._slots.host.max_lengths, drafts)
            if drafts:
                handle = self._run_with_drafts(plan, host, drafts, timer)
            else:
                handle = self._launch_rows(plan, host, timer)
        if isinstance(handle, MaskedStepHandle):
            self._masked_step = handle
        return handle

    def launch_drafting(self, plan: Plan, times: int = 1) -> None:
        """Launch a plan without new owners of slots so many times; from the second time on each row goes on with the
        token that it has sampled. Nobody is told what they sample, but `device_tokens`."""
        with torch.inference_mode():
            rows, staged = _drafting_rows(plan), 0
            if (kept := self._kept.get(rows)) is None:
                host = HostBatch.of(plan, self._slots.host.max_lengths)
                shape = self._shape_for(host)
                if not rows or shape is None or not (shape.is_decode or shape.kind is StepKind.SHORT):
                    for _ in range(times):
                        self._launch_rows(plan, host, self._timers.start())
                    return
                self._apply(plan, self._stage(plan, host.padded_to(shape, self._slots.dummy), shape=shape))
                kept, staged = self._keep(rows, KeptStep(host, shape, self._staging.copied_columns)), 1
                self._graphs.replay(shape)
            for number in range(staged, times):
                self._stage_alike(_EMPTY_PLAN if number else plan, kept)
                self._graphs.replay(kept.shape)

    def rewind(self, slots: Sequence[int], lengths: Sequence[int], num_sampled: Sequence[int]) -> None:
        """Set slots to these lengths, and to these numbers of sampled tokens."""
        self._slots.rewind(slots, lengths, num_sampled)

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        """The bitmasks of the plan that was launched last."""
        assert self._masked_step is not None, "no step waits for bitmasks"
        step, self._masked_step = self._masked_step, None
        step.submit_bitmasks(masks)

    def _launch_rows(self, plan: Plan, host: HostBatch, timer: StepTimer) -> StepHandle:
        """A plan without drafts."""
        if not plan.prompt_logprobs_rows and (shape := self._shape_for(host)):
            return self._replay(plan, host, shape, timer)
        return self._run(plan, host, timer)

    def _launch_changes(self, plan: Plan, timer: StepTimer) -> StepHandle:
        """A plan without rows."""
        staging = self._staging
        staging.begin()
        slot_updates, block_moves = self._slots.stage(plan, staging), self._transfer.stage(plan, staging)
        staging.finish()
        self._slots.apply(slot_updates)
        self._transfer.apply(plan, block_moves)
        staging.copy_to_device()
        return timer.stop(lambda ms: Result(plan.step, [], [], device_ms=ms))

    def _shape_for(self, host: HostBatch) -> GraphShape | None:
        """The captured shape that the batch can be padded to, if there is one."""
        sizes = len(host.token_ids), len(host.slots), len(host.sampled_slots), host.decode_rows
        if self._short == 2 and not host.is_decode and (short := self._shapes.for_short(*sizes[:3])) is not None:
            return short
        if self._recorded is not None:
            return self._recorded.for_step(*sizes, adapted=self._adapted(host))
        return self._shapes.for_step(*sizes)

    def _replay(self, plan: Plan, host: HostBatch, shape: GraphShape, timer: StepTimer) -> StepHandle:
        """A captured step. Its graph samples for the dummy in place of late positions, which are sampled behind it; a
        recorded step can wait for bitmasks itself.
        """
        sampling = self._sampler.begin(plan.step, host.sampled_slots, host.masked, timer)
        if self._recorded is not None and self._sampler.needs_bitmasks_only(sampling):
            inputs = self._stage(plan, host, None, shape)
            self._apply(plan, inputs)
            logits = self._recorded.replay_logits(shape, adapted=inputs.adapted)
            return self._sampler.sample_masked(sampling, logits, self._recorded.sample)
        inputs = self._stage(plan, host.padded_to(shape, self._slots.dummy), sampling, shape)
        self._apply(plan, inputs)
        graphs = self._recorded or self._graphs
        logits = graphs.replay(shape, adapted=inputs.adapted)
        if inputs.late is None:
            return self._sampler.finish(sampling, logits, NO_PROMPT_LOGPROBS)
        return self._sampler.sample_late(sampling, logits[: len(sampling.slots)], inputs.late, NO_PROMPT_LOGPROBS)

    def _run(self, plan: Plan, host: HostBatch, timer: StepTimer) -> StepHandle:
        """A step of any shape."""
        sampling = self._sampler.begin(plan.step, host.sampled_slots, host.masked, timer)
        inputs = self._stage(plan, host, sampling)
        self._apply(plan, inputs)
        batch, hidden = self._forward(host, inputs)
        prompts = self._launch_prompt_logprobs(plan, host, batch, hidden)
        if not plan.sampled_rows:
            return timer.stop(lambda ms: Result(plan.step, [], [], device_ms=ms, prompt_logprobs=prompts.collect()))
        logits = self._logits(hidden, inputs)
        if not sampling.all_late:
            self._sample(logits, inputs)
        if inputs.late is None:
            return self._sampler.finish(sampling, logits, prompts)
        return self._sampler.sample_late(sampling, logits, inputs.late, prompts)

    def _run_with_drafts(self, plan: Plan, host: HostBatch, drafts: StepDrafts, timer: StepTimer) -> StepHandle:
        """A step whose tokens are sampled behind it."""
        verification = Verification(plan.step, drafts, host.sampled_slots, host.masked, timer)
        if self._device_verifier is not None:
            return self._run_ahead(plan, host, verification, self._device_verifier)
        shape = None if plan.prompt_logprobs_rows or self._recorded is None else self._shape_for(host)
        inputs, prompts = self._stage(plan, host), NO_PROMPT_LOGPROBS
        self._apply(plan, inputs)
        if shape is not None and self._recorded is not None:
            logits = self._recorded.replay_logits(shape, adapted=inputs.adapted)
        else:
            batch, hidden = self._forward(host, inputs)
            prompts = self._launch_prompt_logprobs(plan, host, batch, hidden)
            logits = self._logits(hidden, inputs)
        return self._verifier.verify(verification, logits, prompts)

    def _run_ahead(
        self, plan: Plan, host: HostBatch, verification: Verification, verifier: DeviceVerifier
    ) -> StepHandle:
        """The same on a device that decides by itself. The graph of a short step verifies, if that needs nothing of the
        host; any other one samples for the dummy in place of all positions."""
        shape, prompts = None if plan.prompt_logprobs_rows else self._shape_of_drafts(host), NO_PROMPT_LOGPROBS
        padded = host if shape is None else host.padded_to(shape, self._slots.dummy)
        at_once = padded.is_short and not verifier.needs_host(verification)
        inputs = self._stage(
            plan, padded, None if at_once else verification, shape, drafts=verification.drafts if at_once else None
        )
        self._apply(plan, inputs)
        if shape is not None:
            rows = _verified_rows(plan, verification.drafts)
            if at_once and rows and self._adapters is None:
                self._keep(rows, KeptStep(host, shape, self._staging.copied_columns, verification.drafts))
            logits = self._graphs.replay(shape, adapted=inputs.adapted)
            if at_once:
                return verifier.finish(verification, logits, shape.sampled, prompts)
            logits = logits[: len(verification.slots)]
        else:
            batch, hidden = self._forward(host, inputs)
            prompts = self._launch_prompt_logprobs(plan, host, batch, hidden)
            logits = self._logits(hidden, inputs)
        assert inputs.late is not None, "each sampled row has a position"
        return verifier.verify(verification, logits, inputs.late, prompts)

    def _verify_alike(
        self, plan: Plan, kept: KeptStep, verification: Verification, verifier: DeviceVerifier
    ) -> StepHandle:
        """The same of a step whose rows were verified before."""
        self._slots.host.max_lengths[kept.host.slots] += kept.host.counts
        self._stage_alike(plan, kept)
        logits = self._graphs.replay(kept.shape)
        return verifier.finish(verification, logits, kept.shape.sampled, NO_PROMPT_LOGPROBS)

    def _keep(self, rows: tuple[int, ...], step: KeptStep) -> KeptStep:
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[rows] = step
        return step

    def _stage_alike(self, plan: Plan, kept: KeptStep) -> None:
        """Stage what was kept of a step, and make the plan's changes."""
        staging = self._staging
        staging.begin_alike(kept.columns)
        slot_updates, block_moves = self._slots.stage(plan, staging), self._transfer.stage(plan, staging)
        staging.finish()
        self._slots.apply(slot_updates)
        self._transfer.apply(plan, block_moves)

    def _shape_of_drafts(self, host: HostBatch) -> GraphShape | None:
        """The captured shape for a step with drafts."""
        sizes = len(host.token_ids), len(host.slots), len(host.sampled_slots)
        short = self._shapes.for_short(*sizes) if sizes[0] == sizes[2] else None
        return self._shape_for(host) if short is None else short

    def _stage(
        self,
        plan: Plan,
        host: HostBatch,
        sampling: StepSampling | Verification | None = None,
        shape: GraphShape | None = None,
        adapted: Adapted = Adapted.NOTHING,
        drafts: StepDrafts | None = None,
    ) -> StepInputs:
        """Write all that the step takes from the host into the staging buffer.

        What a captured graph reads is copied to the device: in steps of one shape it has the same length and place each
        time. The rest, which only some steps have, is read from the host.

        Args:
            plan: For its changes.
            host: Its rows.
            sampling: What it samples late; None: nothing.
            shape: Of the captured graph, if there is one.
            adapted: What of the model it is staged for as if adapters of tokens of the dummy changed it.
            drafts: Those that the graph of a short step verifies.
        """
        staging, sampled_slots = self._staging, host.sampled_slots
        verifies = host.is_short and self._device_verifier is not None  # then all tokens are sampled
        selects = not (host.is_decode or verifies) or self._slots.device.type == "cpu"  # whose recordings are alike
        columns = padded_columns(drafts, shape.sampled, shape.sampled) if verifies and shape is not None else None
        late = None if sampling is None else sampling.columns()
        if sampling is not None and late is not None:
            sampled_slots = sampled_slots.copy()
            sampled_slots[sampling.late] = self._slots.dummy
        metadata: AttentionMetadata[IntArray] = AttentionMetadata()
        if not host.is_short:
            limits = None if shape is None else shape.limits
            metadata = self._attention.build_metadata(host.counts, host.max_lengths, limits)
        adapted = self._adapted(host) if adapted is Adapted.NOTHING else adapted
        staging.begin()
        inputs = StepInputs(
            slots=staging.copied(host.slots),
            token_ids=staging.copied(host.token_ids),
            counts=staging.copied(host.counts),
            row_of_token=staging.copied(host.row_of_token),
            offsets=staging.copied(host.offsets),
            attention=metadata.with_arrays([staging.copied(array) for array in metadata.arrays()]),
            sampled_slots=staging.copied(sampled_slots),
            logits_indices=staging.copied(host.logits_indices) if selects else None,
            drafts=None if columns is None else DraftColumns(*map(staging.copied, columns)),
            tiles=None if adapted is Adapted.NOTHING else self._stage_tiles(host, shape),
            expert_slots=self._stage_expert_slots(host) if adapted is Adapted.EXPERTS else None,
            stage_step=None if (step := self._stages.column(plan)) is None else staging.copied(step),
            late=None if late is None else staging.zero_copy(late),
            slot_updates=self._slots.stage(plan, staging),
            block_moves=self._transfer.stage(plan, staging),
        )
        staging.finish()
        return inputs

    def _adapted(self, host: HostBatch) -> Adapted:
        """What adapters change in the step."""
        if self._adapters is None:
            return Adapted.NOTHING
        return self._adapters.kind_of(self._slots.host.adapters[host.slots])

    def _stage_tiles(self, host: HostBatch, shape: GraphShape | None) -> Tiles:
        assert self._adapters is not None
        adapters = self._slots.host.adapters[host.slots]
        if shape is None and not adapters.any():
            return self._adapters.stage_dummies(host, self._staging)
        return self._adapters.stage(host, adapters, self._staging, shape)

    def _stage_expert_slots(self, host: HostBatch) -> Tensor:
        assert self._adapters is not None
        return self._adapters.stage_expert_slots(host, self._slots.host.adapters[host.slots], self._staging)

    def _apply(self, plan: Plan, inputs: StepInputs) -> None:
        """Make the plan's changes, and wait for tokens that its rows read."""
        self._slots.apply(inputs.slot_updates)
        self._transfer.apply(plan, inputs.block_moves)
        self._stages.await_tokens(plan, self._slots.last_token)

    def _forward_and_sample(self, host: HostBatch, inputs: StepInputs) -> Tensor:
        """What a captured graph does; returns [sampled, vocab] logits."""
        _, hidden = self._forward(host, inputs)
        logits = self._logits(hidden, inputs)
        self._sample(logits, inputs)
        return logits

    def _sample(self, logits: Tensor, inputs: StepInputs) -> None:
        if inputs.drafts is not None:
            assert self._device_verifier is not None
            self._device_verifier.verify_at_once(logits, inputs.sampled_slots, inputs.drafts)
            return
        self._sampler.sample(logits, inputs.sampled_slots)
        if self._device_tokens is not None:
            self._device_tokens.sampled(inputs.sampled_slots)

    def _forward(self, host: HostBatch, inputs: StepInputs) -> tuple[Batch, Tensor]:
        """The step's batch and its hidden states, [tokens, hidden]."""
        self._staging.copy_to_device()
        batch = self._batches.prepare(host, inputs)
        self._attention.prepare(batch.rows)
        if self._adapters is not None:
            self._adapters.begin(inputs.tiles, inputs.expert_slots)
        if self._states is not None:
            self._states.begin(batch, inputs)
        self._stages.begin(inputs.stage_step)
        return batch, self._model.hidden(batch.tokens, batch.positions, self._attention)

    def _logits(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        """[sampled, vocab]."""
        if (at := inputs.logits_indices) is None:
            return self._model.logits(hidden)
        chosen = hidden.new_empty((len(at), hidden.shape[1]))
        self._take_rows(hidden, at, chosen)
        return self._model.logits(chosen)

    def _launch_prompt_logprobs(self, plan: Plan, host: HostBatch, batch: Batch, hidden: Tensor) -> StepPromptLogprobs:
        if not plan.prompt_logprobs_rows:
            return NO_PROMPT_LOGPROBS
        wanted = [self._slots.host.prompt_logprobs[plan.slots[each.row]] for each in plan.prompt_logprobs_rows]
        return self._prompt_logprobs.launch(plan, host, batch, hidden, wanted)


def _drafting_rows(plan: Plan) -> tuple[int, ...]:
    """By what steps of a draft model are known that are alike; empty, where tokens differ that the host knows."""
    if any(token >= 0 for token in plan.tokens):
        return ()
    return (*plan.slots, -1, *plan.counts, -1, *plan.tokens, -1, *plan.sampled_rows)


def _verified_rows(plan: Plan, drafts: StepDrafts) -> tuple[int, ...]:
    """By what steps with drafts are known that are alike; empty, where tokens differ that the host knows."""
    if not drafts.on_device or plan.token_rows:
        return ()
    return (*plan.slots, -1, *plan.counts, -1, *plan.drafts, -1, *drafts.counts.tolist())


def _build_sampler(
    model: Model, slots: SlotTable, limits: StepLimits, mode: LogprobsMode, ring: BufferRing, stages: StageSteps
) -> StepSampler | NoSampler:
    """What ends the steps of this model."""
    if not model.has_logits:
        return NoSampler(slots, mode, ring)
    most = max(limits.sampled, MOST_SHORT_TOKENS)
    verified = max(limits.rows, MOST_SHORT_TOKENS) if limits.drafts else 0
    return StepSampler(slots, max(limits.rows, most), mode, ring, most, partial(_send_tokens, stages, slots), verified)


def _send_tokens(stages: StageSteps, slots: SlotTable, step: int) -> None:
    stages.send_tokens(step, slots.last_token)
