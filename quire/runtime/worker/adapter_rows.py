"""Maps the tokens of a step to their adapters, as tiles on the device."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.reference.lora import Tiles
from quire.models.lora.step_tiles import GPU_TILE, Adapted, StepTiles, max_tiles, order_tokens, tile_tokens
from quire.models.lora.updates import LowRankUpdates
from quire.runtime.worker.graph_shapes import GraphShape
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.staging_buffer import CopiedColumns


class AdapterRows:
    """Stages which tokens of a step use which adapter, as tiles. A CPU has one tile per token, so that one recording
    serves all steps."""

    def __init__(self, updates: LowRankUpdates, *, on_gpu: bool) -> None:
        self._step: StepTiles = updates.step
        self._updates = updates
        self._slots = updates.slots
        self._on_gpu = on_gpu

    @property
    def recorded(self) -> tuple[Adapted, ...]:
        """The kinds of steps to capture or record. A CPU does not record steps whose adapters change experts."""
        with_experts = (Adapted.EXPERTS,) if self._on_gpu and self._updates.has_experts else ()
        return (Adapted.NOTHING, Adapted.PROJECTIONS, *with_experts)

    def kind_of(self, adapters: IntArray) -> Adapted:
        """Return what these adapters change in the model. `adapters` [rows] are the slots of the rows' adapters; 0:
        none."""
        if not adapters.any():
            return Adapted.NOTHING
        return Adapted.EXPERTS if self._updates.changes_experts[adapters].any() else Adapted.PROJECTIONS

    def begin(self, tiles: Tiles | None, expert_slots: Tensor | None) -> None:
        """Set the tiles and expert slots that layers read in the next launched step."""
        self._step.tiles = tiles
        self._step.expert_slots = expert_slots

    def stage_expert_slots(self, host: HostBatch, adapters: IntArray, staging: CopiedColumns) -> Tensor:
        """Stage each token's adapter slot if the adapter changes experts, else 0, [tokens]. The arguments are those of
        `stage`."""
        of_tokens = adapters[host.row_of_token]
        return staging.add(np.where(self._updates.changes_experts[of_tokens], of_tokens, 0))

    def stage(
        self, host: HostBatch, adapters: IntArray, staging: CopiedColumns, shape: GraphShape | None = None
    ) -> Tiles:
        """Stage the tiles of a step as columns that are copied to the device.

        Args:
            adapters: [rows], the slot of each row's adapter.
            shape: Shape of the captured graph, for which the numbers of entries and tiles are padded; None without a
                graph.
        """
        of_tokens = adapters[host.row_of_token]
        if not self._on_gpu:
            return _staged(*order_tokens(of_tokens), staging)
        if shape is None:
            return _staged(*tile_tokens(of_tokens, GPU_TILE), staging, of_tokens)
        return self._staged_padded(of_tokens, shape.rows, staging)

    def stage_dummies(self, host: HostBatch, staging: CopiedColumns) -> Tiles:
        """Stage the maximum number of tiles for a step of this size, in which no token has an adapter."""
        none = np.zeros(len(host.token_ids), dtype=np.int64)
        if not self._on_gpu:
            return _staged(*order_tokens(none), staging)
        return self._staged_padded(none, len(host.slots), staging)

    def _staged_padded(self, of_tokens: IntArray, num_rows: int, staging: CopiedColumns) -> Tiles:
        """Stage the tiles of these tokens, padded with empty ones to the maximum for such a step."""
        most = max_tiles(len(of_tokens), num_rows, self._slots, GPU_TILE)
        slots, rows = tile_tokens(of_tokens, GPU_TILE)
        all_slots, all_rows = np.zeros(most, dtype=np.int64), np.full((most, GPU_TILE), -1, dtype=np.int64)
        all_slots[: len(slots)], all_rows[: len(rows)] = slots, rows
        return _staged(all_slots, all_rows, staging, of_tokens)


def _staged(slots: IntArray, rows: IntArray, staging: CopiedColumns, of_tokens: IntArray | None = None) -> Tiles:
    slot_of_row = None if of_tokens is None else staging.add(of_tokens)
    return Tiles(staging.add(slots), staging.add(rows.reshape(-1)).view(rows.shape), slot_of_row)
