"""The metadata of a step's attention: which rows are decoded, which are prefilled, and in what tiles.

The metadata are made on the host, and copied to the device with the step's other columns. Columns are one-dimensional
and int64. This module knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.compute.kernels.reference.attention_inputs import DecodeRows, DenseTiles, GatherChunks, KVSplits, QueryTiles

IntArray = npt.NDArray[np.int64]


class PrefillMetadata(NamedTuple):
    """Rows of several tokens that read their contexts through the block table.

    Attributes:
        tiles: The tiles of these rows.
        splits: How the tiles' keys are split; None: they are not.
        dense_tiles: How many of the first tiles belong to rows that DensePrefillMetadata serves too. Only layers with a
            window use these tiles.
    """

    tiles: QueryTiles
    splits: KVSplits | None = None
    dense_tiles: int = 0


class DensePrefillMetadata(NamedTuple):
    """Rows of many tokens, whose keys and values are gathered out of the paged cache before attention: their tiles, and
    the chunks of their contexts."""

    tiles: DenseTiles
    chunks: GatherChunks


class AttentionMetadata(NamedTuple):
    """The metadata of a step. Without any part, every row is a decode row, and row n has token n.

    If layers differ in shape, they are those of the first shape, and `others` has those of each other one.
    """

    decode: DecodeRows | None = None
    prefill: PrefillMetadata | None = None
    dense_prefill: DensePrefillMetadata | None = None
    others: tuple[AttentionMetadata, ...] = ()

    def copied(self, copy: Callable[[Tensor], Tensor]) -> AttentionMetadata:
        """Copy each column, for example to a device."""
        decode, prefill, dense, others = self
        if decode is not None:
            decode = DecodeRows(*map(copy, decode))
        if prefill is not None:
            splits = None if prefill.splits is None else KVSplits(*map(copy, prefill.splits))
            prefill = PrefillMetadata(QueryTiles(*map(copy, prefill.tiles)), splits, prefill.dense_tiles)
        if dense is not None:
            dense = DensePrefillMetadata(DenseTiles(*map(copy, dense.tiles)), GatherChunks(*map(copy, dense.chunks)))
        return AttentionMetadata(decode, prefill, dense, tuple(other.copied(copy) for other in others))
