"""Stages what a step needs from the host, and makes its plan's changes."""

from __future__ import annotations

import numpy as np

from quire.compute.attention.backend import AttentionBackend
from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.compute.kernels.reference.state_inputs import StateRows
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.adapter_rows import AdapterRows
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.kv_transfer import BlockMoves, BlockTransfer
from quire.runtime.worker.slot_table import SlotTable, SlotUpdates
from quire.runtime.worker.speculation.draft_states import DraftStates
from quire.runtime.worker.speculation.step_drafts import DraftColumns, StepDrafts, draft_columns, padded_columns
from quire.runtime.worker.stage_tokens import StageTokens
from quire.runtime.worker.staging_buffer import CopiedColumns, StagedColumns, StagingBuffer, ZeroCopyColumns
from quire.runtime.worker.step import Step, StepInputs, StepKey, StepKind

_MAX_KEPT = 256
"""Maximum number of kept steps. While the same sequences run, few steps differ: if drafts stay on the device, the host
knows the same of all steps of a draft model, and of all that verify its drafts."""


class StepStager:
    """Stages steps in order. `verifies` says whether the graphs of short steps verify drafts; `states` are None if no
    layer keeps states of sequences."""

    def __init__(
        self,
        staging: StagingBuffer,
        slots: SlotTable,
        transfer: BlockTransfer,
        attention: AttentionBackend,
        adapters: AdapterRows | None,
        stages: StageTokens | None,
        *,
        verifies: bool,
        states: DraftStates | None = None,
    ) -> None:
        self._staging = staging
        self._slots = slots
        self._transfer = transfer
        self._attention = attention
        self._adapters = adapters
        self._stages = stages
        self._verifies = verifies
        self._states = states
        self._on_cpu = slots.device.type == "cpu"
        self._kept: dict[StepKey, Step] = {}

    def stage(self, step: Step) -> None:
        """Stage the step's columns, make its plan's changes, and wait for tokens from other stages that its rows read.
        Columns of a step with a key are kept, so that staging an equal step reuses them."""
        if step.alike is not None:
            step.staged = self._stage_changes(step.plan, self._staging.begin_alike(step.alike))
            return
        step.staged = staged = self._stage_changes(step.plan, self._stage_columns(step))
        if self._stages is not None:
            self._stages.await_tokens(step.plan, self._slots.last_token)
        if step.key:
            step.alike = staged.copied
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[step.key] = step

    def kept(self, key: StepKey) -> Step | None:
        """Return the staged step with this key, or None. Its `max_lengths` are out of date."""
        return self._kept.get(key)

    def stage_dummy(self, step: Step) -> None:
        """Stage a step of the dummy slot, whose plan changes nothing."""
        step.staged = self._stage_columns(step).finish()

    def stage_changes(self, plan: Plan) -> None:
        """Stage and make the changes of a plan without rows."""
        self._stage_changes(plan, self._staging.begin().end()).copy_to_device()

    @property
    def overflowed(self) -> bool:
        """Whether a column of the last staged step did not fit into the staging buffer."""
        return self._staging.overflowed

    def _stage_columns(self, step: Step) -> ZeroCopyColumns:
        """Write the step's inputs, apart from the plan's changes, into the staging buffer.

        Inputs that a captured graph reads are copied to the device, where steps of one shape have them at the same
        place. The device reads the other inputs, which only some steps have, from the host.
        """
        shape, slots = step.shape, self._slots
        host = step.host if shape is None else step.host.padded_to(shape, slots.dummy)
        verifies = host.is_short and self._verifies  # then all tokens are sampled
        selects = not (host.is_decode or verifies) or self._on_cpu  # whose recordings are alike
        sampled_slots, late = host.sampled_slots, late_columns(step)
        if late is not None:
            sampled_slots = sampled_slots.copy()
            sampled_slots[step.late] = slots.dummy
        metadata = AttentionMetadata()
        if not host.is_short:
            limits = None if shape is None else shape.limits
            metadata = self._attention.build_metadata(host.counts, host.max_lengths, limits)
        copied, tiles, expert_slots = self._staging.begin(), None, None
        if self._adapters is not None:
            adapters = self._slots.host.adapters[host.slots]
            tiles, expert_slots = self._adapters.stage(step.adapted, host, adapters, shape, copied)
        step.inputs = StepInputs(
            slots=copied.add(host.slots),
            token_ids=copied.add(host.token_ids),
            counts=copied.add(host.counts),
            row_of_token=copied.add(host.row_of_token),
            offsets=copied.add(host.offsets),
            attention=metadata.copied(lambda column: copied.add(column.numpy())),
            sampled_slots=copied.add(sampled_slots),
            logits_indices=copied.add(host.logits_indices) if selects else None,
            drafts=_stage_drafts(step, copied) if verifies else None,
            tiles=tiles,
            expert_slots=expert_slots,
            stage_step=None if self._stages is None else copied.add(np.array([step.number], dtype=np.int64)),
            state_rows=None if self._states is None else self._stage_state_rows(self._states, step, host, copied),
        )
        zero_copy = copied.end()
        if late is not None:
            step.late_columns = zero_copy.add(late)
        return zero_copy

    def _stage_state_rows(self, states: DraftStates, step: Step, host: HostBatch, copied: CopiedColumns) -> StateRows:
        starts = np.append(host.first_tokens, len(host.token_ids))
        return StateRows(copied.add(states.of_rows(step, host)), copied.add(starts))

    def _stage_changes(self, plan: Plan, zero_copy: ZeroCopyColumns) -> StagedColumns:
        """Stage a plan's changes after the columns that are staged already, and apply them."""
        slot_updates: SlotUpdates = self._slots.stage(plan, zero_copy)
        block_moves: BlockMoves = self._transfer.stage(plan, zero_copy)
        staged = zero_copy.finish()
        self._slots.apply(slot_updates)
        self._transfer.apply(plan, block_moves)
        return staged


def late_columns(step: Step) -> IntArray | None:
    """Return the host column of `Step.late_columns`; None if no position is late or the step stops at its logits."""
    if step.stops_at_logits or not len(step.late):
        return None
    if step.kind is StepKind.VERIFY:
        return np.concatenate((step.slots, *draft_columns(step.drafts)))
    return np.concatenate((step.late, step.slots[step.late], step.masked))


def _stage_drafts(step: Step, copied: CopiedColumns) -> DraftColumns:
    """Stage the drafts that a short step's graph verifies, or padding if it verifies none."""
    assert step.shape is not None, "a short step has a shape"
    drafts = step.drafts if step.verified_by_graph else None
    return DraftColumns(*map(copied.add, padded_columns(drafts, step.shape.sampled, step.shape.sampled)))


def drafting_key(plan: Plan) -> StepKey:
    """Return the key of a draft model's step; empty if the plan names tokens, as such a step does not come again."""
    if any(token >= 0 for token in plan.tokens):
        return ()
    return (*plan.slots, -1, *plan.counts, -1, *plan.tokens, -1, *plan.sampled_rows)


def verified_key(plan: Plan, drafts: StepDrafts) -> StepKey:
    """Return the key of a step that verifies drafts; empty if the host names drafts or tokens."""
    if not drafts.on_device or plan.token_rows:
        return ()
    return (*plan.slots, -1, *plan.counts, -1, *plan.drafts, -1, *drafts.counts.tolist())
