"""Which tokens of a step have which adapter: made on the host, read by layers while the step is launched."""

from __future__ import annotations

from enum import Enum, auto

import numpy as np
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.reference.lora import Tiles

GPU_TILE = 16
"""Rows that a tensor core multiplies at least."""


class Adapted(Enum):
    """What of a model the adapters of a step change. Steps of each kind are captured or recorded apart, so that none
    launches what it does not need.
    """

    NOTHING = auto()
    """No token has an adapter."""
    PROJECTIONS = auto()
    """Adapters change projections, but no experts."""
    EXPERTS = auto()
    """Adapters change experts, and may change projections too."""


class StepTiles:
    """Which tokens of the step that is being launched have which adapter: `tiles` has tokens by adapter, and
    `expert_slots` [tokens] int64 the slot of each token's adapter if that changes experts, otherwise 0. Each is None if
    there is no such token."""

    def __init__(self) -> None:
        self.tiles: Tiles | None = None
        self.expert_slots: Tensor | None = None


def order_tokens(slots: IntArray) -> tuple[IntArray, IntArray]:
    """Sort tokens by adapter, each a tile of its own, as a CPU takes them: always as many tiles as tokens. Returns the
    tiles' slots [tokens], with 0 (no adapter) last, and which token each tile has [tokens, 1], -1 for slot 0."""
    order = np.argsort(-slots, kind="stable")
    own = slots[order]
    order[own == 0] = -1
    return own, order[:, None]


def tile_tokens(slots: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """Sort tokens by adapter, tokens without one last, and cut them into tiles of `size` tokens. `slots` [tokens] are
    the slots of their adapters on the device, from 1, or 0. Returns each tile's slot [tiles], and its tokens [tiles,
    size], filled up with -1."""
    order = np.argsort(-slots, kind="stable")
    used, counts = np.unique(-slots, return_counts=True)
    number = -(-counts // size)  # tiles of each adapter
    first_tile, first_token = number.cumsum() - number, counts.cumsum() - counts
    place = np.arange(len(order)) - np.repeat(first_token, counts)  # of a token among its adapter's
    rows = np.full((int(number.sum()), size), -1, dtype=np.int64)
    rows[np.repeat(first_tile, counts) + place // size, place % size] = order
    return np.repeat(-used, number).astype(np.int64), rows


def max_tiles(tokens: int, rows: int, slots: int, size: int) -> int:
    """The maximum number of tiles of a step of these sizes, each row of which has one adapter or none."""
    return tokens // size + min(min(rows, slots) + 1, tokens)
