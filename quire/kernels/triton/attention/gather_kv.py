"""Contexts out of the paged cache into one piece of memory, where long attention reads them at full speed.

A token costs 4 · kv_heads · d elements of traffic, half of it writing: nothing beside the products of several hundred
queries with it. A program copies a few tokens of all heads, which lie together in both places.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.kernels.triton.launching.launch import launched

_TOKENS, _COLUMNS = 16, 512
"""Of a program at a time."""


def gather_kv(
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    pack_rows: Tensor,
    pack_offsets: Tensor,
    pack_counts: Tensor,
    k: Tensor,
    v: Tensor,
) -> None:
    """Arguments as in reference/paged_attention.py; all but the table are contiguous."""
    _, block_size, kv_heads, d = keys.shape
    packs = pack_rows.shape[0]
    each = k.shape[0] // packs
    assert each % _TOKENS == 0
    assert all(map(Tensor.is_contiguous, (keys, values, slots, pack_rows, pack_offsets, pack_counts, k, v)))
    overlap = can_overlap(k.device)
    _gather_kv[(packs, each // _TOKENS)](
        keys, values, table, slots, pack_rows, pack_offsets, pack_counts, k, v, table.stride(0),
        WIDTH=kv_heads * d, BLOCK_SIZE=block_size, EACH=each, TOKENS=_TOKENS, COLUMNS=_COLUMNS, OVERLAP=overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


@launched
@triton.jit(
    do_not_specialize=["table_line"],
    do_not_specialize_on_alignment=["slots", "pack_rows", "pack_offsets", "pack_counts"],
)
def _gather_kv(
    keys,
    values,
    table,
    slots,
    pack_rows,
    pack_offsets,
    pack_counts,
    k,
    v,
    table_line,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release_dependents(OVERLAP)
    pack, token = tl.program_id(0), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + tl.load(pack_rows + pack))
    position = tl.load(pack_offsets + pack) + token
    exists = token < tl.load(pack_counts + pack)
    block = tl.load(table + slot * table_line + position // BLOCK_SIZE, exists, 0)
    source = ((block * BLOCK_SIZE + position % BLOCK_SIZE) * WIDTH)[:, None]
    target = ((pack.to(tl.int64) * EACH + token) * WIDTH)[:, None]
    for at in tl.static_range(0, WIDTH, COLUMNS):
        column = at + tl.arange(0, COLUMNS)[None, :]
        inside = column < WIDTH
        x = tl.load(keys + source + column, exists[:, None] & inside, 0.0)
        y = tl.load(values + source + column, exists[:, None] & inside, 0.0)
        tl.store(k + target + column, x, inside & (token >= 0)[:, None])
        tl.store(v + target + column, y, inside & (token >= 0)[:, None])
