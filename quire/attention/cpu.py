"""Attention on the CPU, from torch's own kernels.

Rows of one token go together, padded to the longest; longer rows go one at a time. Only a row's length decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionLayer, KVView, PaddedLimits, QKNormRope, Rows
from quire.attention.metadata import AttentionMetadata, IntArray
from quire.kernels.dispatch import kernel

_MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class _DecodeRows:
    """All rows of one token; `tokens` are their places in the batch, None if they are the whole of it.

    `blocks` [rows, n] begin with the first that a row sees, and `length` tokens of them are read.
    """

    tokens: Tensor | None
    blocks: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class _PrefillRow:
    """One longer row, its tokens from `first` to `end` in the batch; `blocks` begin with the first that they see."""

    first: int
    end: int
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class _GroupStep:
    """A step as one KV group's layers see it.

    `new_blocks` are those whose first token comes in this step. They are zeroed before they are written, so that what
    an earlier owner left there (a NaN, say) never reaches the masked positions behind a row's end.
    """

    slot_mapping: Tensor
    new_blocks: Tensor
    decode: _DecodeRows | None
    prefill: tuple[_PrefillRow, ...]


class CpuAttention:
    """An AttentionBackend over a KV cache in main memory."""

    def __init__(self, kv: KVView) -> None:
        self._kv = kv
        self._dtype = kv.keys[0].dtype
        self._qk_norm_rope_and_cache = kernel("qk_norm_rope_and_cache", "cpu")
        self._decode_attention_padded = kernel("decode_attention_padded", "cpu")
        self._prefill_attention_row = kernel("prefill_attention_row", "cpu")
        self._steps: list[_GroupStep] = []

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata[IntArray]:
        """Nothing: all of it is on the host, where `prepare` finds it."""
        return AttentionMetadata()

    def prepare(self, rows: Rows) -> None:
        lengths = rows.starts.numpy() + rows.counts
        groups = zip(rows.tables, self._kv.windows, strict=True)
        self._steps = [self._prepare_group(rows, table, lengths, window) for table, window in groups]

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        keys, values = self._kv.keys[layer.number], self._kv.values[layer.number]
        step = self._steps[self._kv.groups[layer.number]]
        if step.new_blocks.numel():
            keys.index_fill_(0, step.new_blocks, 0)
            values.index_fill_(0, step.new_blocks, 0)
        q = torch.empty_like(out)
        self._qk_norm_rope_and_cache(qkv, *norm_rope, keys, values, step.slot_mapping, q)
        if step.decode is not None:
            self._run_decode(step.decode, layer, q, keys, values, out)
        for row in step.prefill:
            span = slice(row.first, row.end)
            self._prefill_attention_row(q[span], keys, values, row.blocks, row.mask, out[span], layer.scale, layer.cap)

    def _run_decode(
        self, decode: _DecodeRows, layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, out: Tensor
    ) -> None:
        rest = (keys, values, decode.blocks, decode.length, decode.mask)
        if decode.tokens is None:
            self._decode_attention_padded(q, *rest, out, layer.scale, layer.cap)
            return
        some = torch.empty((len(decode.tokens), *out.shape[1:]), dtype=out.dtype, device=out.device)
        self._decode_attention_padded(q.index_select(0, decode.tokens), *rest, some, layer.scale, layer.cap)
        out.index_copy_(0, decode.tokens, some)

    def _prepare_group(self, rows: Rows, table: Tensor, lengths: IntArray, window: int | None) -> _GroupStep:
        size = self._kv.block_size
        block_of_token = table[rows.slot_of_token, rows.positions // size]
        offset = rows.positions % size
        numbers = (rows.counts == 1).nonzero()[0]
        longer = (rows.counts > 1).nonzero()[0].tolist()
        return _GroupStep(
            slot_mapping=block_of_token * size + offset,
            new_blocks=block_of_token[offset == 0],
            decode=self._decode_rows(rows, table, lengths, numbers, window) if len(numbers) else None,
            prefill=tuple(self._prefill_row(rows, table, lengths, row, window) for row in longer),
        )

    def _decode_rows(
        self, rows: Rows, table: Tensor, lengths: IntArray, numbers: IntArray, window: int | None
    ) -> _DecodeRows:
        size, slots, tokens = self._kv.block_size, rows.slots, None
        if len(numbers) < len(lengths):
            tokens = torch.from_numpy(rows.counts.cumsum()[numbers] - 1)
            slots, lengths = slots.index_select(0, torch.from_numpy(numbers)), lengths[numbers]
        if window is not None and int(lengths.max()) > window:
            return self._windowed_decode_rows(tokens, table, slots, lengths, window)
        longest = int(lengths.max())
        width = -(-longest // size)
        blocks = table[slots, :width]
        mask = None
        if int(lengths.min()) < longest:
            own = torch.from_numpy(lengths).unsqueeze(1)
            blocks = blocks.masked_fill(torch.arange(width) * size >= own, 0)
            mask = self._mask(torch.arange(longest) >= own)
        return _DecodeRows(tokens, blocks, longest, mask)

    def _windowed_decode_rows(
        self, tokens: Tensor | None, table: Tensor, slots: Tensor, lengths: IntArray, window: int
    ) -> _DecodeRows:
        """Rows that see their last `window` tokens, each from the block where these begin."""
        size = self._kv.block_size
        first = np.maximum(lengths - window, 0)  # the first position that is seen
        entry = first // size
        longest = int((lengths - entry * size).max())
        entries = torch.from_numpy(entry).unsqueeze(1) + torch.arange(-(-longest // size))  # [rows, n]
        own, begin = torch.from_numpy(lengths).unsqueeze(1), torch.from_numpy(first).unsqueeze(1)
        blocks = table[slots.unsqueeze(1), entries.clamp(max=table.shape[1] - 1)].masked_fill_(entries * size >= own, 0)
        positions = torch.from_numpy(entry).unsqueeze(1) * size + torch.arange(longest)
        return _DecodeRows(tokens, blocks, longest, self._mask((positions >= own) | (positions < begin)))

    def _prefill_row(self, rows: Rows, table: Tensor, lengths: IntArray, row: int, window: int | None) -> _PrefillRow:
        size = self._kv.block_size
        count, length, end = int(rows.counts[row]), int(lengths[row]), int(rows.counts[: row + 1].sum())
        entry = 0 if window is None else max(0, length - count - window + 1) // size
        blocks = table[rows.slots[row], entry : -(-length // size)]
        mask = None
        if count < length or (window is not None and window < length):
            seen = length - entry * size
            hidden = torch.ones(count, seen, dtype=torch.bool).triu_(seen - count + 1)
            if window is not None:
                hidden |= torch.ones(count, seen, dtype=torch.bool).tril_(seen - count - window)
            mask = torch.zeros(count, seen, dtype=self._dtype).masked_fill_(hidden, _MINUS_INFINITY)
        return _PrefillRow(end - count, end, blocks, mask)

    def _mask(self, hidden: Tensor) -> Tensor:
        """[rows, n] bool → [rows, 1, 1, n], what is added to scores."""
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, _MINUS_INFINITY)
        return mask[:, None, None]
