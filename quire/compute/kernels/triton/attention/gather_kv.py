"""Copies contexts from the paged cache to contiguous memory, where long attention reads them at full speed.

A token costs 4 · kv_heads · d elements of traffic, half of it writes, which is little beside the products of several
hundred queries with it. A program copies a few tokens of all heads, which lie together in both places.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.attention_inputs import GatherChunks, PagedKV
from quire.compute.kernels.triton.attention.score_scaling import widened
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch

_TOKENS, _COLUMNS = 16, 512
"""Tokens and columns that a program copies at a time."""


def gather_kv(kv: PagedKV, block_table: Tensor, slots: Tensor, chunks: GatherChunks, k: Tensor, v: Tensor) -> None:
    """Implement reference/paged_attention.py's `gather_kv`; all tensors but the block table are contiguous."""
    keys, values, scales = kv
    _, block_size, kv_heads, d = keys.shape
    number = len(chunks.rows)
    each = k.shape[0] // number
    assert each % _TOKENS == 0
    assert all(map(Tensor.is_contiguous, (keys, values, slots, *chunks, k, v)))
    overlap = can_overlap(k.device)
    _gather_kv[(number, each // _TOKENS)](
        keys, values, block_table, slots, *chunks, k, v, scales, block_table.stride(0),
        D=d, WIDTH=kv_heads * d, BLOCK_SIZE=block_size, EACH=each, TOKENS=_TOKENS, COLUMNS=_COLUMNS, OVERLAP=overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(
    do_not_specialize=["block_table_stride"],
    do_not_specialize_on_alignment=["slots", "chunk_rows", "chunk_offsets", "chunk_counts"],
)
def _gather_kv(
    keys, values, block_table, slots, chunk_rows, chunk_offsets, chunk_counts, k, v, scales, block_table_stride,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, EACH: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    chunk, token = tl.program_id(0), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + tl.load(chunk_rows + chunk))
    position = tl.load(chunk_offsets + chunk) + token
    exists = token < tl.load(chunk_counts + chunk)
    block = tl.load(block_table + slot * block_table_stride + position // BLOCK_SIZE, exists, 0)
    source = ((block * BLOCK_SIZE + position % BLOCK_SIZE) * WIDTH)[:, None]
    target = ((chunk.to(tl.int64) * EACH + token) * WIDTH)[:, None]
    for at in tl.static_range(0, WIDTH, COLUMNS):
        column = at + tl.arange(0, COLUMNS)[None, :]
        inside = column < WIDTH
        x = tl.load(keys + source + column, exists[:, None] & inside, 0.0)
        y = tl.load(values + source + column, exists[:, None] & inside, 0.0)
        x, y = widened(x, k.dtype.element_ty), widened(y, v.dtype.element_ty)
        if scales is not None:
            scale = tl.load(scales + (WIDTH + column) // D, inside, 1.0)
            y = (y.to(tl.float32) * scale).to(v.dtype.element_ty)
        tl.store(k + target + column, x, inside & (token >= 0)[:, None])
        tl.store(v + target + column, y, inside & (token >= 0)[:, None])
