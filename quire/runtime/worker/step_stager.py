"""The beginning of a step: what it takes from the host is staged, and the plan's changes are made."""

from __future__ import annotations

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.compute.kernels.reference.lora import Tiles
from quire.foundation.messages.workers import Plan
from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.adapter_rows import AdapterRows
from quire.runtime.worker.graph_shapes import GraphShape
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.kv_transfer import BlockTransfer
from quire.runtime.worker.sampling.step_sampler import StepSampling
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.step_drafts import DraftColumns, StepDrafts, padded_columns
from quire.runtime.worker.speculation.verification import Verification
from quire.runtime.worker.stage_steps import StageSteps
from quire.runtime.worker.staging_buffer import StagingBuffer
from quire.runtime.worker.step_inputs import StepInputs

EMPTY_PLAN = Plan.empty()


class StepStager:
    """Stages steps, one behind another.

    Args:
        staging: Takes the columns.
        slots: The slot table.
        transfer: Of blocks.
        attention: Makes its metadata.
        adapters: Of rows; None: there are none.
        stages: What other stages of a pipeline are told.
        verifies: Whether the graphs of short steps verify drafts.
    """

    def __init__(
        self,
        staging: StagingBuffer,
        slots: SlotTable,
        transfer: BlockTransfer,
        attention: AttentionBackend,
        adapters: AdapterRows | None,
        stages: StageSteps,
        *,
        verifies: bool,
    ) -> None:
        self._staging = staging
        self._slots = slots
        self._transfer = transfer
        self._attention = attention
        self._adapters = adapters
        self._stages = stages
        self._verifies = verifies
        self._on_cpu = slots.device.type == "cpu"

    def stage(
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
            adapted: What adapters of tokens of the dummy change: it is staged as if they had some.
            drafts: The drafts that the graph of a short step verifies.
        """
        staging, sampled_slots = self._staging, host.sampled_slots
        verifies = host.is_short and self._verifies  # then all tokens are sampled
        selects = not (host.is_decode or verifies) or self._on_cpu  # whose recordings are alike
        columns = padded_columns(drafts, shape.sampled, shape.sampled) if verifies and shape is not None else None
        late = None if sampling is None else sampling.columns()
        if sampling is not None and late is not None:
            sampled_slots = sampled_slots.copy()
            sampled_slots[sampling.late] = self._slots.dummy
        metadata: AttentionMetadata[IntArray] = AttentionMetadata()
        if not host.is_short:
            limits = None if shape is None else shape.limits
            metadata = self._attention.build_metadata(host.counts, host.max_lengths, limits)
        if self._adapters is not None and adapted is Adapted.NOTHING:
            adapted = self._adapters.kind_of(self._slots.host.adapters[host.slots])
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
            tiles=self._stage_tiles(host, shape, adapted),
            expert_slots=self._stage_expert_slots(host, adapted),
            stage_step=None if (step := self._stages.column(plan)) is None else staging.copied(step),
            late=None if late is None else staging.zero_copy(late),
            slot_updates=self._slots.stage(plan, staging),
            block_moves=self._transfer.stage(plan, staging),
        )
        staging.finish()
        return inputs

    def apply(self, plan: Plan, inputs: StepInputs) -> None:
        """Make the changes of the plan that was staged, and wait for tokens that its rows read."""
        self._slots.apply(inputs.slot_updates)
        self._transfer.apply(plan, inputs.block_moves)
        self._stages.await_tokens(plan, self._slots.last_token)

    def apply_changes(self, plan: Plan) -> None:
        """Stage a plan without rows, and make its changes."""
        self._staging.begin()
        self._stage_changes(plan)
        self._staging.copy_to_device()

    def stage_alike(self, plan: Plan, columns: IntArray) -> None:
        """Stage a plan whose rows have these `copied_columns`, as those of another one had, and make its changes."""
        self._staging.begin_alike(columns)
        self._stage_changes(plan)

    @property
    def copied_columns(self) -> IntArray:
        """The columns of the step that was staged last, as they are copied to the device."""
        return self._staging.copied_columns

    def _stage_changes(self, plan: Plan) -> None:
        """Stage a plan's changes behind what is staged already, and make them."""
        staging = self._staging
        slot_updates, block_moves = self._slots.stage(plan, staging), self._transfer.stage(plan, staging)
        staging.finish()
        self._slots.apply(slot_updates)
        self._transfer.apply(plan, block_moves)

    def _stage_tiles(self, host: HostBatch, shape: GraphShape | None, adapted: Adapted) -> Tiles | None:
        """Stage the tiles of the step's adapters; None where adapters change nothing."""
        if self._adapters is None or adapted is Adapted.NOTHING:
            return None
        adapters = self._slots.host.adapters[host.slots]
        if shape is None and not adapters.any():
            return self._adapters.stage_dummies(host, self._staging)
        return self._adapters.stage(host, adapters, self._staging, shape)

    def _stage_expert_slots(self, host: HostBatch, adapted: Adapted) -> Tensor | None:
        """Stage the slots of adapters that change experts; None where none does."""
        if self._adapters is None or adapted is not Adapted.EXPERTS:
            return None
        return self._adapters.stage_expert_slots(host, self._slots.host.adapters[host.slots], self._staging)
