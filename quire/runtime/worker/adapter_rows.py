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

    def stage(
        self, adapted: Adapted, host: HostBatch, adapters: IntArray, shape: GraphShape | None, staging: CopiedColumns
    ) -> tuple[Tiles | None, Tensor | None]:
        """Stage tiles, and each token's adapter slot if the adapter changes experts, else 0, [tokens]; both are None if
        the step does not need them. Tiles are padded for captured graphs, and in dummy steps, where no row has an
        adapter.

        Args:
            adapted: What adapters change in the step.
            adapters: [rows], the slot of each row's adapter.
        """
        if adapted is Adapted.NOTHING:
            return None, None
        of_tokens = adapters[host.row_of_token]
        if not self._on_gpu:
            tiles = _staged(*order_tokens(of_tokens), staging)
        elif shape is not None or not adapters.any():
            tiles = self._staged_padded(of_tokens, len(host.slots), staging)
        else:
            tiles = _staged(*tile_tokens(of_tokens, GPU_TILE), staging, of_tokens)
        if adapted is not Adapted.EXPERTS:
            return tiles, None
        return tiles, staging.add(np.where(self._updates.changes_experts[of_tokens], of_tokens, 0))

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
