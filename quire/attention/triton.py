"""Attention on a GPU, from kernels in Triton.

Rows of one token are cut along their contexts, longer rows along their queries; each kind is one launch, whatever the
mix. A step in which every row has one token asks nothing of the host but the number of its rows: it can be recorded as
a graph and replayed at any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionLayer, HeadRule, Ints, KVView, Rows
from quire.errors import ConfigError
from quire.kernels.reference.paged_rows import PIECE_COLUMNS, new_partials
from quire.kernels.table import kernel
from quire.kernels.triton.attention_chunk import queries_of_tile
from quire.kernels.triton.attention_decode import keys_of_tile, spare_pieces

_WIDEST, _LARGEST_GROUP = 256, 16


@dataclass(frozen=True)
class _Tiles:
    """Rows of several tokens, cut into tiles; see the kernel attend_tiles."""

    rows: Tensor
    offsets: Tensor
    starts: Tensor
    counts: Tensor
    firsts: Tensor
    slots: Tensor


@dataclass(frozen=True)
class _GroupStep:
    """A step as one KV group's layers see it; `pieces` is None where no row has one token, `tiles` where all have."""

    table: Tensor
    window: int | None
    places: Tensor
    pieces: Tensor | None
    tiles: _Tiles | None


class TritonAttention:
    """An AttentionBackend over a KV cache in a GPU's memory.

    Args:
        kv: The cache.
        heads: Query heads.
        max_rows, max_tokens: The largest step.

    Raises:
        ConfigError: The kernels do not serve this shape of attention.
    """

    def __init__(self, kv: KVView, heads: int, max_rows: int, max_tokens: int) -> None:
        cache = kv.keys[0]
        kv_heads, d = cache.shape[2:]
        group = heads // kv_heads
        if d > _WIDEST or heads % kv_heads or group > _LARGEST_GROUP:
            raise ConfigError(
                f"Attention of {heads} query heads and {kv_heads} KV heads, {d} wide, is not supported on a GPU: heads "
                f"may be {_WIDEST} wide, and {_LARGEST_GROUP} query heads share a KV head, at most."
            )
        self._kv = kv
        self._queries = queries_of_tile(d, cache.element_size(), group)
        self._keys_of_tile = keys_of_tile(d, cache.element_size())
        self._spare = spare_pieces(kv_heads, cache.device)
        room = max_rows + self._spare
        self._partials = new_partials(room, heads, kv_heads, d, cache.device)
        self._pieces = torch.zeros((len(kv.windows), room, PIECE_COLUMNS), dtype=torch.int32, device=cache.device)
        self._places = torch.zeros((len(kv.windows), max(max_rows, max_tokens)), dtype=torch.int64, device=cache.device)
        self._steps: list[_GroupStep] = []
        self._rotate_and_store = kernel("rotate_and_store", "cuda")
        self._place_tokens = kernel("place_tokens", "cuda")
        self._cut_contexts = kernel("cut_contexts", "cuda")
        self._attend_pieces = kernel("attend_pieces", "cuda")
        self._attend_tiles = kernel("attend_tiles", "cuda")

    def columns(self, counts: Ints, bounds: Ints) -> tuple[Ints, ...]:
        """Rows of one token and their tokens; tiles, those that take longest first; tokens and first token of each row.

        Nothing if all rows have one token.
        """
        if (counts == 1).all():
            return ()
        firsts = counts.cumsum() - counts
        singles, longer = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        of_row = -(-counts[longer] // self._queries)
        rows = np.repeat(longer, of_row)
        offsets = (np.arange(len(rows)) - np.repeat(of_row.cumsum() - of_row, of_row)) * self._queries
        order = np.argsort(-(bounds[rows] + offsets), kind="stable")
        return singles, firsts[singles], rows[order], offsets[order], counts, firsts

    def prepare(self, rows: Rows) -> None:
        """See AttentionBackend."""
        singles: Tensor | None = None
        tokens: Tensor | None = None
        tiles: _Tiles | None = None
        number = len(rows.counts)
        if rows.columns:
            singles, tokens, tile_rows, tile_offsets, counts, firsts = rows.columns
            tiles = _Tiles(tile_rows, tile_offsets, rows.starts, counts, firsts, rows.slots)
            number = len(singles)
        self._steps = []
        for group, (table, window) in enumerate(zip(rows.tables, self._kv.windows, strict=True)):
            places = self._places[group, : len(rows.positions)]
            self._place_tokens(table, rows.slot_of_token, rows.positions, self._kv.block_size, places)
            pieces = None
            if number:
                pieces = self._pieces[group, : number + self._spare]
                self._cut_contexts(rows.starts, rows.slots, singles, tokens, window, self._keys_of_tile, pieces)
            self._steps.append(_GroupStep(table, window, places, pieces, tiles))

    def run(self, layer: AttentionLayer, qkv: Tensor, rule: HeadRule, out: Tensor) -> None:
        """See AttentionBackend."""
        keys, values = self._kv.keys[layer.number], self._kv.values[layer.number]
        step = self._steps[self._kv.groups[layer.number]]
        q = torch.empty_like(out)
        self._rotate_and_store(qkv, rule.norm, rule.eps, rule.cos, rule.sin, keys, values, step.places, q)
        if step.pieces is not None:
            self._attend_pieces(q, keys, values, step.table, step.pieces, self._partials, out, layer.scale, layer.cap)
        if (tiles := step.tiles) is not None:
            self._attend_tiles(
                q, keys, values, step.table, tiles.rows, tiles.offsets, tiles.starts, tiles.counts, tiles.firsts,
                tiles.slots, step.window, self._queries, out, layer.scale, layer.cap,
            )  # fmt: skip
