"""Divides a step's rows among a GPU's programs, as far as the host knows the rows, and returns AttentionMetadata.

Decode rows (of one token) are only listed: how their keys are split depends on lengths, which only the device knows.
Longer rows are cut into tiles of query tokens. Where these tiles are too few to fill the device, the keys of each are
split too. The longest rows attend to keys that were gathered from the paged cache into contiguous memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.limits import DENSE_MIN_QUERIES, PaddedLimits
from quire.compute.attention.metadata import (
    AttentionMetadata,
    DensePrefillMetadata,
    IntArray,
    PrefillMetadata,
)
from quire.compute.kernels.reference.attention_inputs import DecodeRows, DenseTiles, GatherChunks, KVSplits, QueryTiles


@dataclass(frozen=True)
class PrefillTiling:
    """The sizes and costs of a device's prefill kernels.

    Attributes:
        tile_queries: Query tokens of a tile.
        dense_tile_queries: Query tokens of a tile in dense prefill.
        dense_min_queries: The tokens of a row from which dense prefill serves it; None: it serves no row.
        gather_chunk: Positions that `gather_kv` copies as one chunk.
        gather_capacity: Positions that there is memory for; rows beyond them are not dense.
        max_splits: The maximum KV splits of all tiles together.
        max_unshared_splits: How many splits can have a multiprocessor each.
        split_max_tokens: The maximum tokens of a step whose tiles may be split.
        split_keys: Splits begin at multiples of this many positions (a tile of keys).
        min_split_tiles: The minimum tiles of keys in a split, unless there are fewer in all.
        merge_tiles: The time that merging splits takes, in tiles of keys.
        shared_slowdown: The factor by which a split takes longer when it shares its multiprocessor.
        max_splits_of_tile: The maximum splits of one tile of queries.
    """

    tile_queries: int
    dense_tile_queries: int = 1
    dense_min_queries: int | None = None
    gather_chunk: int = 1
    gather_capacity: int = 0
    max_splits: int = 0
    max_unshared_splits: int = 0
    split_max_tokens: int = 256
    split_keys: int = 1
    min_split_tiles: int = 1
    merge_tiles: float = 0
    shared_slowdown: float = 1
    max_splits_of_tile: int = 1

    def splits_kv(self, tokens: int) -> bool:
        """Whether the tiles of a step with this many tokens are split. If so, tiles of fewer tokens are split too."""
        return 0 < 2 * _ceil(tokens, self.tile_queries) <= self.max_splits and tokens <= self.split_max_tokens


@dataclass(frozen=True)
class RowKinds:
    """The numbers of a step's rows, by the kernel that serves them."""

    decode: IntArray
    prefill: IntArray
    dense: IntArray

    @classmethod
    def of(cls, counts: IntArray, bounds: IntArray, tiling: PrefillTiling) -> RowKinds:
        """Sort rows by their tokens in the step (counts) and the maximum tokens before it (bounds).

        The bounds of rows with several tokens are exact.
        """
        decode, several = (counts == 1).nonzero()[0], (counts > 1).nonzero()[0]
        if tiling.dense_min_queries is None:
            return cls(decode, several, several[:0])
        dense = counts[several] >= tiling.dense_min_queries
        gathered = -(-(counts[several] + bounds[several]) // tiling.gather_chunk) * tiling.gather_chunk
        dense &= np.cumsum(gathered * dense) <= tiling.gather_capacity
        return cls(decode, several[~dense], several[dense])


class HostTiles(NamedTuple):
    """Tiles of query tokens on the host: each tile's row, and the offset of its first token in the row, [tiles]
    each."""

    rows: IntArray
    offsets: IntArray


class HostSplits(NamedTuple):
    """KVSplits on the host."""

    numbers: IntArray
    counts: IntArray


def build_metadata(
    counts: IntArray, bounds: IntArray, tiling: PrefillTiling, limits: PaddedLimits | None = None
) -> AttentionMetadata:
    """Return the metadata of a step, on the host.

    Args:
        counts: [rows] tokens of each row.
        bounds: [rows] the maximum tokens of each row before the step.
        tiling: The device's sizes and costs.
        limits: The limits of a padded step, which alone decide the arrays' lengths and whether tiles are split.
    """
    if limits is not None:
        return _padded_metadata(counts, bounds, tiling, limits)
    if (counts == 1).all():
        return AttentionMetadata()
    kinds, first_tokens = RowKinds.of(counts, bounds, tiling), _firsts(counts)
    decode = DecodeRows(*_columns(kinds.decode, first_tokens[kinds.decode]))
    tiles = tiles_of(counts, bounds, kinds.prefill, tiling.tile_queries)
    if not len(kinds.dense):
        splits = None
        if tiling.splits_kv(int(counts[kinds.prefill].sum())):
            tiles, splits = split_kv(tiles, counts, bounds, tiling)
        return AttentionMetadata(decode, _prefill(tiles, first_tokens, splits))
    dense_tiles = tiles_of(counts, bounds, kinds.dense, tiling.tile_queries)
    every = HostTiles(*(np.concatenate(pair) for pair in zip(dense_tiles, tiles, strict=True)))
    prefill = _prefill(every, first_tokens, None, dense_tiles=len(dense_tiles.rows))
    return AttentionMetadata(decode, prefill, dense_prefill(counts, bounds, kinds, tiling))


def tiles_of(counts: IntArray, bounds: IntArray, rows: IntArray, size: int) -> HostTiles:
    """Return these rows' tiles of `size` tokens, the tiles that take longest first."""
    tile_rows, offsets = _chunks_of(counts, rows, size)
    order = np.argsort(-(bounds[tile_rows] + offsets), kind="stable")
    return HostTiles(tile_rows[order], offsets[order])


def split_kv(
    tiles: HostTiles, counts: IntArray, bounds: IntArray, tiling: PrefillTiling
) -> tuple[HostTiles, HostSplits]:
    """Return the tiles, each repeated for each of its splits, and the splits.

    Splits are about equally long. Their number is the smallest that fills the device, with one or several on a
    multiprocessor, or the tiles stay whole, whichever is estimated to take least time.
    """
    ends = bounds[tiles.rows] + np.minimum(tiles.offsets + tiling.tile_queries, counts[tiles.rows])
    key_tiles = (-(-ends // tiling.split_keys)).tolist()  # so few that lists are faster
    longest = _split_tiles(key_tiles, tiling)
    splits = np.array([_num_splits(n, longest) for n in key_tiles])
    numbers = np.arange(splits.sum()) - np.repeat(_firsts(splits), splits)
    repeated = HostTiles(np.repeat(tiles.rows, splits), np.repeat(tiles.offsets, splits))
    return repeated, HostSplits(numbers, np.repeat(splits, splits))


def _num_splits(key_tiles: int, longest: int) -> int:
    """Return into how many equal, non-empty splits of at most `longest` tiles this many tiles of keys are divided."""
    fewest = _ceil(key_tiles, longest)
    length = _ceil(key_tiles, fewest)
    return _ceil(key_tiles, length)


def _split_tiles(key_tiles: list[int], tiling: PrefillTiling) -> int:
    """Return the tiles of keys of the longest split, for tiles of queries that see `key_tiles` each."""
    whole = max(key_tiles)

    def shortest_within(most: int) -> int:
        """Return the shortest splits that are at most `most` in number, as far as possible."""
        shortest = max(tiling.min_split_tiles, _ceil(whole, tiling.max_splits_of_tile))
        return bisect_left(range(whole), True, shortest, key=lambda n: sum(_ceil(s, n) for s in key_tiles) <= most)

    def cost(longest: int) -> float:
        shared = sum(_ceil(s, longest) for s in key_tiles) > tiling.max_unshared_splits
        return longest * (tiling.shared_slowdown if shared else 1) + (tiling.merge_tiles if longest < whole else 0)

    if whole <= max(tiling.min_split_tiles, tiling.merge_tiles):
        return whole
    candidates = (whole, shortest_within(tiling.max_unshared_splits), shortest_within(tiling.max_splits))
    return min(candidates, key=cost)


def dense_prefill(counts: IntArray, bounds: IntArray, kinds: RowKinds, tiling: PrefillTiling) -> DensePrefillMetadata:
    """Return the dense rows' tiles, the tiles that take longest first, and their chunks row by row."""
    rows, offsets = tiles_of(counts, bounds, kinds.dense, tiling.dense_tile_queries)
    lengths = counts + bounds
    gathered = -(-lengths[kinds.dense] // tiling.gather_chunk) * tiling.gather_chunk
    bases = np.zeros_like(counts)
    bases[kinds.dense] = _firsts(gathered)
    chunk_rows, chunk_offsets = _chunks_of(lengths, kinds.dense, tiling.gather_chunk)
    first_tokens = _firsts(counts)[rows] + offsets
    queries = np.minimum(counts[rows] - offsets, tiling.dense_tile_queries)
    chunk_counts = np.minimum(lengths[chunk_rows] - chunk_offsets, tiling.gather_chunk)
    return DensePrefillMetadata(
        DenseTiles(*_columns(first_tokens, queries, bounds[rows] + offsets, bases[rows])),
        GatherChunks(*_columns(chunk_rows, chunk_offsets, chunk_counts)),
    )


def _prefill(
    tiles: HostTiles, first_tokens: IntArray, splits: HostSplits | None, dense_tiles: int = 0
) -> PrefillMetadata:
    of_splits = None if splits is None else KVSplits(*_columns(*splits))
    return PrefillMetadata(QueryTiles(*_columns(*tiles, first_tokens)), of_splits, dense_tiles)


def _columns(*arrays: IntArray) -> Iterator[Tensor]:
    return map(torch.from_numpy, arrays)


def _padded_metadata(
    counts: IntArray, bounds: IntArray, tiling: PrefillTiling, limits: PaddedLimits
) -> AttentionMetadata:
    """Return metadata whose columns have the maximum length within these limits. Kernels skip the padding."""
    assert len(counts) == limits.rows and not counts[-1], "the last row has no token"
    assert limits.tokens < DENSE_MIN_QUERIES, "how keys are gathered depends on lengths"
    min_tokens = 2 if limits.decode_rows else 1  # of a row that is cut into tiles
    first_tokens = _firsts(counts)
    decode = (counts == 1).nonzero()[0] if limits.decode_rows else counts[:0]
    tiles = tiles_of(counts, bounds, (counts >= min_tokens).nonzero()[0], tiling.tile_queries)
    most = limits.tokens // tiling.tile_queries + min(limits.rows, limits.tokens // min_tokens)
    splits = None
    if tiling.splits_kv(limits.tokens):
        tiles, splits = _padded_splits(tiles, counts, bounds, tiling, most)
        most = max(most, tiling.max_splits)
    tiles = HostTiles(_padded(tiles.rows, most, limits.rows - 1), _padded(tiles.offsets, most, 0))
    numbers, tokens = _padded(decode, limits.decode_rows, -1), _padded(first_tokens[decode], limits.decode_rows, 0)
    return AttentionMetadata(DecodeRows(*_columns(numbers, tokens)), _prefill(tiles, first_tokens, splits))


def _padded_splits(
    tiles: HostTiles, counts: IntArray, bounds: IntArray, tiling: PrefillTiling, max_tiles: int
) -> tuple[HostTiles, HostSplits]:
    """Return padded `split_kv`; tiles stay whole where there may be as many as the maximum number of splits."""
    if 0 < len(tiles.rows) < tiling.max_splits:
        tiles, splits = split_kv(tiles, counts, bounds, tiling)
    else:
        ones = np.ones(len(tiles.rows), dtype=np.int64)
        splits = HostSplits(0 * ones, ones)
    most = max(max_tiles, tiling.max_splits)
    return tiles, HostSplits(_padded(splits.numbers, most, 0), _padded(splits.counts, most, 0))


def _padded(array: IntArray, length: int, entry: int) -> IntArray:
    padded = np.full(length, entry, dtype=np.int64)
    padded[: len(array)] = array
    return padded


def _ceil(n: int, of: int) -> int:
    return -(-n // of)


def _firsts(counts: IntArray) -> IntArray:
    """Return where each range begins, for consecutive ranges of these lengths."""
    return counts.cumsum() - counts


def _chunks_of(lengths: IntArray, rows: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """Return rows and offsets of the chunks of `size` positions of these rows, in order."""
    of_row = -(-lengths[rows] // size)
    of_chunk = np.repeat(rows, of_row)
    return of_chunk, (np.arange(len(of_chunk)) - np.repeat(_firsts(of_row), of_row)) * size
