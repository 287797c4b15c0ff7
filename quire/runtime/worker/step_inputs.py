"""What a step reads from the host, as named device tensors.

The way of a plan: Plan (lists) → HostBatch (numpy columns) → StepInputs (the columns on the device) → Batch (what
follows from them and from the slot table).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from quire.compute.attention.metadata import AttentionMetadata
from quire.compute.kernels.reference.lora import Tiles
from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.kv_transfer import BlockMoves
from quire.runtime.worker.slot_table import SlotUpdates
from quire.runtime.worker.speculation.step_drafts import DraftColumns


class StepInputs(NamedTuple):
    """Device tensors of one step; all int64. Padding belongs to the dummy slot. Fields are used by name; it is a tuple
    because one is made for every step.

    Attributes:
        slots: [rows], see HostBatch; the same for the next four.
        token_ids: [tokens].
        counts: [rows].
        row_of_token: [tokens].
        offsets: [tokens].
        attention: The attention backend's metadata.
        sampled_slots: [sampled], the slots for which the step samples.
        logits_indices: [sampled], where among the tokens each sampled position is; None: all tokens are sampled.
        late: [3 · late, or fewer], which positions are sampled behind a captured graph, which samples for the dummy in
            their place: see LateColumns. None: there are none.
        slot_updates: Changes of the slot table.
        block_moves: Swaps and copies of blocks.
        tiles: Which tokens have which adapter; None: none has any.
        expert_slots: [tokens], the slot of the adapter of each whose adapter changes experts, and else 0; None: none's
            does.
        drafts: Of a short step that is verified by its graph, which drafts it has; None: it is no such step.
        stage_step: [1], what the step's streams are known by in other stages of a pipeline; None: there are none.
    """

    slots: Tensor
    token_ids: Tensor
    counts: Tensor
    row_of_token: Tensor
    offsets: Tensor
    attention: AttentionMetadata[Tensor]
    sampled_slots: Tensor
    logits_indices: Tensor | None
    late: Tensor | None
    slot_updates: SlotUpdates
    block_moves: BlockMoves
    tiles: Tiles | None = None
    expert_slots: Tensor | None = None
    drafts: DraftColumns[Tensor] | None = None
    stage_step: Tensor | None = None

    @property
    def adapted(self) -> Adapted:
        """What adapters change in the step."""
        if self.tiles is None:
            return Adapted.NOTHING
        return Adapted.PROJECTIONS if self.expert_slots is None else Adapted.EXPERTS
