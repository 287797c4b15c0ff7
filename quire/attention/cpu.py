"""Attention on the CPU, from torch's own kernels.

Rows of one token go together, padded to the longest; longer rows go one at a time. Only a row's length decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention.backend import KVView, Rows
from quire.kernels.table import kernel

Ints = npt.NDArray[np.int64]
_MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class _Singles:
    """All rows of one token; `tokens` are their places in the batch, None if they are the whole of it."""

    tokens: Tensor | None
    blocks: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class _Chunk:
    """One longer row, its tokens from `first` to `end` in the batch."""

    first: int
    end: int
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class _GroupStep:
    """A step as one KV group's layers see it.

    `fresh` are the blocks whose first token comes in this step. They are zeroed before they are written, so that what
    an earlier owner left there (a NaN, say) never reaches the masked positions behind a row's end.
    """

    places: Tensor
    fresh: Tensor
    singles: _Singles | None
    chunks: tuple[_Chunk, ...]


class CpuAttention:
    """An AttentionBackend over a KV cache in main memory."""

    def __init__(self, kv: KVView) -> None:
        self._kv = kv
        self._dtype = kv.keys[0].dtype
        self._kv_write = kernel("kv_write", "cpu")
        self._attend_tokens = kernel("attend_tokens", "cpu")
        self._attend_chunk = kernel("attend_chunk", "cpu")
        self._steps: list[_GroupStep] = []

    def prepare(self, rows: Rows) -> None:
        """See AttentionBackend."""
        lengths = rows.starts.numpy() + rows.counts
        self._steps = [self._prepare_group(rows, table, lengths) for table in rows.tables]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """See AttentionBackend."""
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        step = self._steps[self._kv.groups[layer]]
        if step.fresh.numel():
            keys.index_fill_(0, step.fresh, 0)
            values.index_fill_(0, step.fresh, 0)
        self._kv_write(k, v, keys, values, step.places)
        if step.singles is not None:
            self._run_singles(step.singles, q, keys, values, out)
        for chunk in step.chunks:
            span = slice(chunk.first, chunk.end)
            self._attend_chunk(q[span], keys, values, chunk.blocks, chunk.mask, out[span])

    def _run_singles(self, singles: _Singles, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        rest = (keys, values, singles.blocks, singles.length, singles.mask)
        if singles.tokens is None:
            self._attend_tokens(q, *rest, out)
            return
        some = torch.empty((len(singles.tokens), *out.shape[1:]), dtype=out.dtype, device=out.device)
        self._attend_tokens(q.index_select(0, singles.tokens), *rest, some)
        out.index_copy_(0, singles.tokens, some)

    def _prepare_group(self, rows: Rows, table: Tensor, lengths: npt.NDArray[np.int64]) -> _GroupStep:
        size = self._kv.block_size
        slot_of_token = rows.slots.index_select(0, torch.from_numpy(rows.row_of_token))
        block_of_token = table[slot_of_token, rows.positions // size]
        offset = rows.positions % size
        single = np.flatnonzero(rows.counts == 1)
        longer = np.flatnonzero(rows.counts > 1).tolist()
        return _GroupStep(
            places=block_of_token * size + offset,
            fresh=block_of_token[offset == 0],
            singles=self._singles(rows, table, lengths, single) if len(single) else None,
            chunks=tuple(self._chunk(rows, table, lengths, row) for row in longer),
        )

    def _singles(self, rows: Rows, table: Tensor, lengths: Ints, single: Ints) -> _Singles:
        size, slots, tokens = self._kv.block_size, rows.slots, None
        if len(single) < len(lengths):
            tokens = torch.from_numpy(rows.counts.cumsum()[single] - 1)
            slots, lengths = slots.index_select(0, torch.from_numpy(single)), lengths[single]
        longest = int(lengths.max())
        width = -(-longest // size)
        blocks = table[slots, :width]
        mask = None
        if int(lengths.min()) < longest:
            own = torch.from_numpy(lengths).unsqueeze(1)
            blocks = blocks.masked_fill(torch.arange(width) * size >= own, 0)
            mask = torch.zeros(len(lengths), longest, dtype=self._dtype)
            mask = mask.masked_fill_(torch.arange(longest) >= own, _MINUS_INFINITY).view(-1, 1, 1, longest)
        return _Singles(tokens, blocks, longest, mask)

    def _chunk(self, rows: Rows, table: Tensor, lengths: Ints, row: int) -> _Chunk:
        count, length, end = int(rows.counts[row]), int(lengths[row]), int(rows.counts[: row + 1].sum())
        blocks = table[rows.slots[row], : -(-length // self._kv.block_size)]
        mask = None
        if count < length:
            later = torch.ones(count, length, dtype=torch.bool).triu_(length - count + 1)
            mask = torch.zeros(count, length, dtype=self._dtype).masked_fill_(later, _MINUS_INFINITY)
        return _Chunk(end - count, end, blocks, mask)
