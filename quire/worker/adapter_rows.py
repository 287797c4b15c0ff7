"""Which tokens of a step have which adapter: from the slots of its rows to tiles on the device.

Knows nothing about what adapters hold.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.attention.metadata import IntArray
from quire.kernels.reference.lora import Tiles
from quire.lora.step_tiles import GPU_TILE, StepTiles, most_tiles, order_tokens, tile_tokens
from quire.lora.updates import LowRankUpdates
from quire.worker.graph_shapes import GraphShape
from quire.worker.host_batch import HostBatch
from quire.worker.staging_buffer import StagingBuffer


class AdapterRows:
    """Stages the tiles of steps.

    Args:
        updates: Of the model.
        on_gpu: Whether a GPU computes. A CPU has a tile for each token, so that one recording serves all steps.
    """

    def __init__(self, updates: LowRankUpdates, *, on_gpu: bool) -> None:
        self._step: StepTiles = updates.step
        self._updates = updates
        self._slots = updates.slots
        self._on_gpu = on_gpu

    def begin(self, tiles: Tiles | None) -> None:
        """The step that is launched next."""
        self._step.tiles = tiles
        self._step.expert_slots = None
        if tiles is not None and self._updates.changes_experts.any():
            slots = torch.zeros(len(tiles.slots), dtype=torch.int64)
            for slot, token in zip(tiles.slots.tolist(), tiles.rows[:, 0].tolist(), strict=True):
                if self._updates.changes_experts[slot]:
                    slots[token] = slot
            self._step.expert_slots = slots if slots.any() else None

    def can_replay(self, adapters: IntArray) -> bool:
        """Whether a recorded step serves rows of these slots: products of experts are recorded without adapters."""
        return not self._updates.changes_experts[adapters].any()

    def stage(
        self, host: HostBatch, adapters: IntArray, staging: StagingBuffer, shape: GraphShape | None = None
    ) -> Tiles:
        """The tiles of a step, as columns that are copied to the device.

        Args:
            host: Its rows, with those that fill a graph.
            adapters: [rows], the slot of each one's adapter.
            staging: Takes the columns.
            shape: Of the captured graph, if there is one: then there are as many entries and tiles in each step.
        """
        of_tokens = adapters[host.row_of_token]
        if not self._on_gpu:
            return _staged(*order_tokens(of_tokens), staging)
        if shape is None:
            return _staged(*tile_tokens(of_tokens, GPU_TILE), staging, of_tokens)
        return self._staged_padded(of_tokens, shape.rows, staging)

    def stage_dummies(self, host: HostBatch, staging: StagingBuffer) -> Tiles:
        """Of a step as large as any of its size, of which no token has an adapter."""
        none = np.zeros(len(host.token_ids), dtype=np.int64)
        if not self._on_gpu:
            return _staged(*order_tokens(none), staging)
        return self._staged_padded(none, len(host.slots), staging)

    def _staged_padded(self, of_tokens: IntArray, num_rows: int, staging: StagingBuffer) -> Tiles:
        """With as many empty tiles behind as make the most that such a step can have."""
        most = most_tiles(len(of_tokens), num_rows, self._slots, GPU_TILE)
        slots, rows = tile_tokens(of_tokens, GPU_TILE)
        all_slots, all_rows = np.zeros(most, dtype=np.int64), np.full((most, GPU_TILE), -1, dtype=np.int64)
        all_slots[: len(slots)], all_rows[: len(rows)] = slots, rows
        return _staged(all_slots, all_rows, staging, of_tokens)


def _staged(slots: IntArray, rows: IntArray, staging: StagingBuffer, of_tokens: IntArray | None = None) -> Tiles:
    slot_of_row = None if of_tokens is None else staging.copied(of_tokens)
    return Tiles(staging.copied(slots), staging.copied(rows.reshape(-1)).view(rows.shape), slot_of_row)
