"""Runs a model's steps from plan to result, in one pipeline, `ModelRunner.launch`:

1. `_begin` makes a `Step` (`step.py`) of a plan: its rows, how it ends, and the captured shape that it is replayed as.
2. `StepStager.stage` stages its columns for the device, and makes the plan's changes.
3. `_forward` computes logits: a small step is replayed (`replay.py`), any other runs kernel by kernel.
4. `_end` samples tokens (`sampling/sampler.py`) or verifies drafts (`speculation/verification.py`), and launches the
   copy of the outputs to the host.

The kind of a step, and whether sampling needs the host, decide where tokens are sampled:

- usually in part 3, by `_compute` and so by captured graphs, with the slots' sampling parameters alone;
- in part 4, by `Sampler.end`, at positions whose bitmasks, logits transforms or reported scores need the host;
- drafts in part 3 if the graph of a short step verifies them (`Verifier.verify_at_once`), else in part 4.

On a GPU a step is only launched, and only `StepHandle.result` waits for the device. These parts keep state between
steps:

- `SlotTable`: each sequence's length, last token, counters, block tables, sampling parameters, token counts for
  penalties, and drafts that only the device knows;
- the KV cache: keys and values, which attention reads and writes and `BlockTransfer` moves;
- `StateTensors`: states of sequences, in models whose layers keep any;
- `ModelStates`: states that a draft head reads;
- `StepStager`: staged columns of steps with drafts that may come again;
- the worker's `AdaptiveDrafter`: what drafts are proposed from, and how many of them pay.

All other buffers are reused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.kernels.dispatch import kernel
from quire.foundation.messages.workers import Plan, Result, TokenBitmasks
from quire.models.lora.step_tiles import Adapted
from quire.models.lora.updates import LowRankUpdates
from quire.models.model import Model
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.adapter_rows import AdapterRows
from quire.runtime.worker.async_scheduling import MAX_STEPS_IN_FLIGHT
from quire.runtime.worker.batch import Batch, BatchBuffers
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.graph_shapes import MAX_ROWS, MAX_SHORT_TOKENS, ShortSteps
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.kv_transfer import BlockTransfer
from quire.runtime.worker.media import MediaEncoder, two_sided_spans, with_axes
from quire.runtime.worker.pooling import Pooler
from quire.runtime.worker.replay import CudaGraphs, Replayable
from quire.runtime.worker.sampling.logprobs import LogprobsMode, PromptLogprobs
from quire.runtime.worker.sampling.sampler import Sampler
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.sources import SlotSources
from quire.runtime.worker.speculation.draft_states import DraftStates
from quire.runtime.worker.speculation.draft_steps import DeviceTokens
from quire.runtime.worker.speculation.hidden_states import StepStates
from quire.runtime.worker.speculation.step_drafts import StepDrafts
from quire.runtime.worker.speculation.synthetic_acceptance import SyntheticAcceptance
from quire.runtime.worker.speculation.verification import Verifier
from quire.runtime.worker.stage_tokens import StageTokens
from quire.runtime.worker.staging_buffer import StagingBuffer
from quire.runtime.worker.state_tensors import StateTensors
from quire.runtime.worker.step import Step, StepKey, StepKind
from quire.runtime.worker.step_handle import MaskedStepHandle, PooledStepHandle, StepHandle, StepTimer, StepTimers
from quire.runtime.worker.step_stager import StepStager, drafting_key, verified_key

_STAGED_ENTRIES = 10
"""Entries of the staging buffer per row and per token: the maximum for a step's columns, without changes of block
tables and moves of blocks, which are uploaded separately if they do not fit."""
_STATE_ENTRIES = 2
"""Further entries of the staging buffer per row with states."""
_TILE_ENTRIES = 19
"""Further entries of the staging buffer per row and per token with adapters, for tiles and expert slots."""


class ModelRunner:
    """Launches plans in order.

    Args:
        limits: Maximum sizes of a step, for which buffers are allocated.
        by_length: Whether the model's rope depends on a sequence's length.
        max_logprobs: Maximum tokens that a request may have reported beside the sampled one; -1 for all.
        updates: What adapters change in the model; None without adapters.
        states: Hidden states that a draft head reads, told of each step before its model runs; None without a head.
        stages: Coordinates the stages of a pipeline; None if the model is not divided.
        synthetic: Decides in place of the model which drafts are accepted; None: the model decides.
        device_tokens: Looks up tokens that only the device knows, for a draft model; a model that verifies makes its
            own.
        pooler: Makes vectors and values of texts; None: nothing is asked for.
        generates: Whether any row may be sampled.
        media: Makes vectors of images; None: the model reads text alone, or another pipeline stage has the tower.
        recurrent: The states of sequences; None if no layer keeps any.
        shifts_positions: Whether images take fewer positions than they have tokens (M-RoPE).
        sources: Admits sequences with what an encoder makes of what they bring; None: there is no encoder.

    Attributes:
        runs_ahead: Whether steps are only launched, so that the host may not know yet what they sample.
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
        stages: StageTokens | None = None,
        synthetic: SyntheticAcceptance | None = None,
        device_tokens: DeviceTokens | None = None,
        in_flight: int = MAX_STEPS_IN_FLIGHT,
        pooler: Pooler | None = None,
        generates: bool = True,
        media: MediaEncoder | None = None,
        recurrent: StateTensors | None = None,
        shifts_positions: bool = False,
        sources: SlotSources | None = None,
    ) -> None:
        rows, most = max(limits.rows, MAX_ROWS), max(limits.sampled, MAX_SHORT_TOKENS)
        ring = BufferRing(slots.device, in_flight)
        self.runs_ahead = ring.has_device_memory
        verifies = limits.drafts > 0 and self.runs_ahead
        if verifies:
            device_tokens = DeviceTokens(slots)
        short = ShortSteps.NONE
        if device_tokens is not None:
            short = ShortSteps.VERIFYING if verifies else ShortSteps.DRAFTING
        adapters = None if updates is None else AdapterRows(updates, on_gpu=slots.device.type != "cpu")
        entries = _STAGED_ENTRIES + (0 if updates is None else _TILE_ENTRIES)
        entries += 0 if recurrent is None else _STATE_ENTRIES
        staging = StagingBuffer(entries * (rows + limits.tokens), ring)

        self.slots = slots
        self._admit = slots.admit if sources is None else sources.admit
        self._model = model
        self._attention = attention
        self._recurrent = recurrent
        self._draft_states = None if recurrent is None else DraftStates(recurrent, slots)
        self._adapters = adapters
        self._states = states
        self._limits = limits
        self._stages = stages
        self._device_tokens = device_tokens
        self._max_logprobs = slots.vocab_size if max_logprobs < 0 else min(max_logprobs, slots.vocab_size)
        self._kinds = (Adapted.NOTHING,) if adapters is None else adapters.recorded
        self._ring = ring
        self._stager = StepStager(
            staging, slots, transfer, attention, adapters, stages, verifies=verifies, states=self._draft_states
        )
        self._batches = BatchBuffers(slots, rows, limits.tokens, by_length, device_tokens, shifts=shifts_positions)
        self._replayable: Replayable = CudaGraphs(short)
        self._prompt_logprobs = PromptLogprobs(model, slots)
        self._take_rows = kernel("take_rows", slots.device.type)
        self._timers = StepTimers(slots.device, in_flight)
        self._sampler: Sampler | None = None
        self._verifier: Verifier | None = None
        self._pooler = pooler
        self._media = media
        if model.has_logits and generates:  # else a later stage of a pipeline samples
            verified = max(limits.rows, MAX_SHORT_TOKENS) if limits.drafts else 0
            self._sampler = sampler = Sampler(
                slots, max(limits.rows, most), logprobs_mode, ring, max_masked=most, stages=stages, rows=verified
            )
            if limits.drafts:
                self._verifier = Verifier(
                    slots, most, logprobs_mode, sampler.bitmasks, sampler.outputs, synthetic, self._draft_states,
                    runs_ahead=self.runs_ahead,
                )  # fmt: skip
        self._keeps_verified = verifies and adapters is None
        self._masked_step: MaskedStepHandle | None = None

    # --- steps ------------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan, drafts: StepDrafts | None = None) -> StepHandle:
        """Apply the plan's changes, run its rows with the proposed `drafts`, and sample their tokens. Masked rows are
        sampled once `submit_bitmasks` brings their bitmasks, before the next plan is launched."""
        assert self._masked_step is None, "a step waits for its bitmasks"
        timer = self._timers.start()
        with torch.inference_mode():
            self._admit(plan.admitted)
            if not plan.slots:
                self._stager.stage_changes(plan)
                return timer.stop(lambda ms: Result(plan.step, [], [], device_ms=ms))
            step = self._begin(plan, drafts, timer)
            self._stager.stage(step)
            if self._draft_states is not None:
                self._draft_states.begin(step)
            logits = self._forward(step)
            if self._draft_states is not None and step.kind is not StepKind.VERIFY:
                self._draft_states.settle(step)
            handle = self._end(step, logits)
        if isinstance(handle, MaskedStepHandle):
            self._masked_step = handle
        return handle if step.vectors is None else PooledStepHandle(handle, step.vectors)

    def launch_drafting(self, plan: Plan, times: int = 1) -> None:
        """Launch a draft model's plan without new owners of slots `times` times; each repetition continues with the
        tokens that the one before sampled. Only for a device that runs ahead: the host does not wait, and does not
        learn what is sampled."""
        with torch.inference_mode():
            step = self._begin_drafting(plan)
            for _ in range(times):
                self._stager.stage(step)
                self._forward(step)
                step.plan = Plan.empty()  # its changes are made once

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        """Hand over the bitmasks of the last launched plan."""
        assert self._masked_step is not None, "no step waits for bitmasks"
        step, self._masked_step = self._masked_step, None
        step.submit_bitmasks(masks)

    # --- the parts of a step -----------------------------------------------------------------------------------------

    def _begin(self, plan: Plan, drafts: StepDrafts | None, timer: StepTimer) -> Step:
        """Make the step of a plan whose new slot owners are admitted: its rows, how it is replayed, and how it ends.
        The slots' `max_lengths` move behind the step."""
        key: StepKey = ()
        if (
            drafts
            and self._keeps_verified
            and not (plan.masked or plan.prompt_logprobs_rows or plan.pooled_rows or plan.media_rows)
        ):
            key = verified_key(plan, drafts)
        step = self._begin_kept(key, plan, drafts, timer) if key and drafts else None
        if step is None:
            step = self._begin_new(plan, drafts, timer)
            step.key = key if step.verified_by_graph else ()
        self.slots.host.max_lengths[step.host.slots] += step.host.counts
        return step

    def _begin_kept(self, key: StepKey, plan: Plan, drafts: StepDrafts, timer: StepTimer) -> Step | None:
        """Make a step that is staged like an earlier one with the same key; None if there is none, or its graph cannot
        verify."""
        if (kept := self._stager.kept(key)) is None:
            return None
        step = Step(plan, StepKind.VERIFY, kept.host, timer, drafts, shape=kept.shape, alike=kept.alike)
        self._begin_verifying(step)
        return step if step.verified_by_graph else None

    def _begin_new(self, plan: Plan, drafts: StepDrafts | None, timer: StepTimer) -> Step:
        host = HostBatch.of(plan, self.slots.host.max_lengths, drafts)
        step = Step(plan, StepKind.COMPUTE, host, timer, adapted=self._adapted(host))
        if drafts:
            step.kind, step.drafts = StepKind.VERIFY, drafts
        elif plan.sampled_rows and self._sampler is not None:
            step.kind = StepKind.SAMPLE
        if not (plan.prompt_logprobs_rows or plan.pooled_rows or plan.media_rows):
            step.shape = self._replayable.covers(step)
        if step.kind is StepKind.VERIFY:
            self._begin_verifying(step)
        elif step.kind is StepKind.SAMPLE and self._sampler is not None:
            self._sampler.begin(step, can_stop=step.shape is not None and self._replayable.can_stop)
        return step

    def _begin_drafting(self, plan: Plan) -> Step:
        """Make the step of a draft model's plan, and reuse what was staged for a step with the same key."""
        key = drafting_key(plan)
        if (kept := self._stager.kept(key)) is not None:
            return Step(plan, StepKind.DRAFT, kept.host, shape=kept.shape, alike=kept.alike)
        host = HostBatch.of(plan, self.slots.host.max_lengths)
        self.slots.host.max_lengths[host.slots] += host.counts
        step = Step(plan, StepKind.DRAFT, host, adapted=self._adapted(host))
        step.shape = self._replayable.covers(step)
        if step.shape is not None and (step.shape.is_decode or step.shape.is_short):
            step.key = key
        return step

    def _forward(self, step: Step) -> Tensor:
        """Replay a staged step that has a captured shape, or launch it kernel by kernel. Returns logits [sampled,
        vocab], which a replay pads."""
        return self._compute(step) if step.shape is None else self._replayable.replay(step)

    def _compute(self, step: Step) -> Tensor:
        """Launch a staged step kernel by kernel, with sampling or verification of what is not late. Captured graphs
        contain this too. Returns logits [sampled, vocab], or unused hidden states if nothing is sampled."""
        inputs, (batch, hidden) = step.inputs, self._hidden(step)
        step.prompts = self._prompt_logprobs.launch(step.plan, step.host, batch, hidden)
        if step.plan.pooled_rows and self._pooler is not None:
            step.vectors = self._pooler.launch(step.plan, step.host, hidden)
        if not len(step.slots):
            return hidden
        logits = self._logits(hidden, inputs.logits_indices)
        if inputs.drafts is not None:
            assert self._verifier is not None
            self._verifier.verify_at_once(logits, inputs.sampled_slots, inputs.drafts)
        elif not step.all_late and self._sampler is not None:
            self._sampler.sample(logits, inputs.sampled_slots)
            if self._device_tokens is not None:
                self._device_tokens.sampled(inputs.sampled_slots)
        return logits

    def _hidden(self, step: Step) -> tuple[Batch, Tensor]:
        """Return the step's batch and its hidden states, [tokens, hidden]."""
        inputs = step.inputs
        step.staged.copy_to_device()
        batch = self._batches.prepare(step.host, inputs)
        spans = two_sided_spans(step.plan, step.host) if step.plan.media_rows else None
        self._attention.prepare(batch.rows if spans is None else replace(batch.rows, spans=spans))
        if self._recurrent is not None and inputs.state_rows is not None:
            self._recurrent.by_layer.begin(inputs.state_rows, notes=step.kind is StepKind.VERIFY)
        if self._adapters is not None:
            self._adapters.begin(inputs.tiles, inputs.expert_slots)
        if self._states is not None:
            self._states.begin(batch, inputs)
        if self._stages is not None:
            self._stages.begin(inputs.stage_step)
        positions = batch.positions
        if step.plan.token_types:
            types = np.frombuffer(step.plan.token_types, dtype=np.uint8).astype(np.int64)
            positions = replace(positions, types=upload(types, self.slots.device))
        if step.plan.media_rows:
            media = None if self._media is None else self._media.vectors_of(step.plan, step.host)
            positions = with_axes(step.plan, step.host, positions)
            return batch, self._model.hidden(batch.tokens, positions, self._attention, media)
        return batch, self._model.hidden(batch.tokens, positions, self._attention)

    def _logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        """Return the logits [sampled, vocab] of the tokens at `indices`, or of all tokens."""
        if indices is None:
            return self._model.logits(hidden)
        chosen = hidden.new_empty((len(indices), hidden.shape[1]))
        self._take_rows(hidden, indices, chosen)
        return self._model.logits(chosen)

    def _end(self, step: Step, logits: Tensor) -> StepHandle:
        """Verify or sample what the step has not sampled itself, and launch the copy of its outputs to the host."""
        if step.kind is StepKind.VERIFY:
            assert self._verifier is not None
            return self._verifier.verify(step, logits)
        if step.kind is StepKind.SAMPLE:
            assert self._sampler is not None
            return self._sampler.end(step, logits, self._replayable.replay_rest)
        return step.timer.stop(
            lambda ms: Result(step.number, [], [], device_ms=ms, prompt_logprobs=step.prompt_logprobs())
        )

    def _begin_verifying(self, step: Step) -> None:
        assert self._verifier is not None, "drafts where none were asked for, or of a stage that has no logits"
        if self._draft_states is not None:
            step.shape = None  # a replay leaves nothing to run again
        self._verifier.begin(step)

    def _adapted(self, host: HostBatch) -> Adapted:
        if self._adapters is None:
            return Adapted.NOTHING
        return self._adapters.kind_of(self.slots.host.adapters[host.slots])
