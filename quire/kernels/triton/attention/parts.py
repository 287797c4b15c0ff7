"""Attention of a few tokens behind long contexts: tiles of queries that are cut along their keys too.

Where there are few tiles (see chunk.py), a program each leaves most of the card idle. Here a program takes its share of
a tile's keys, and leaves what it has summed in memory; a second kernel merges what a tile's parts have left, in their
order, after all have ended. A part of m rows of products leaves m · (d + 2) numbers of 4 bytes, and they are read once.
As many programs as there are parts merge, each a few rows at a time, with several parts in work at once. A tile that
has one part writes its outputs, and what would merge it leaves at once. The grids are as large as the columns are long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.paged_rows import Partials
from quire.kernels.triton.attention.chunk import attend_to, tile_shape
from quire.kernels.triton.attention.scores import factors, padded
from quire.kernels.triton.launching.card import multiprocessors
from quire.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.kernels.triton.launching.launch import launched

FEWEST = 4
"""Tiles of keys of a part: shorter ones take longer to merge than they save."""
MOST_OF_A_TILE = 32
"""Parts; a power of two."""
_MOST = 64
"""Of all tiles together."""
_RESIDENT = 2
"""Programs of a multiprocessor at once."""
_MERGED_ROWS, _MERGED_PARTS, _MERGERS = 4, 8, 4
"""What a program that merges has in work at a time, and how many there are for each part and KV head."""


def number_of_parts(kv_heads: int, device: torch.device) -> int:
    """Parts of all tiles together that fill the device."""
    return min(max(1, _RESIDENT * multiprocessors(device) // kv_heads), _MOST)


def attend_parts(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    tile_rows: Tensor,
    tile_offsets: Tensor,
    part_numbers: Tensor,
    part_counts: Tensor,
    starts: Tensor,
    counts: Tensor,
    firsts: Tensor,
    slots: Tensor,
    window: int | None,
    queries: int,
    partials: Partials,
    out: Tensor,
    scale: float,
    cap: float | None = None,
) -> None:
    """See the reference; `queries` is that of `queries_of_tile`. All but the table are contiguous."""
    _, block_size, kv_heads, d = keys.shape
    heads, items = q.shape[1], tile_rows.shape[0]
    shape = tile_shape(d, q.element_size())
    assert queries == shape.rows // (heads // kv_heads)
    columns = (tile_rows, tile_offsets, part_numbers, part_counts, starts, counts, firsts)
    assert all(map(Tensor.is_contiguous, (q, keys, values, *columns, slots, out)))
    before, after = factors(scale, cap)
    overlap = can_overlap(q.device)
    left = (partials.outputs, partials.sums)
    _attend_parts[(items, kv_heads)](
        q, keys, values, table, *columns, slots, *left, out, table.stride(0), window or 0, before, after,
        CAPPED=cap is not None, WINDOWED=window is not None, HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        QUERIES=queries, D=d, D_BLOCK=padded(d), BLOCK_SIZE=block_size, M=shape.rows, N=shape.keys,
        STAGES=shape.stages, FEWEST=FEWEST, OVERLAP=overlap, num_warps=shape.warps, launch_pdl=overlap,
    )  # fmt: skip
    _merge_parts[(items, kv_heads, _MERGERS)](
        *columns, *left, out, window or 0,
        WINDOWED=window is not None, HEADS=heads, GROUP=heads // kv_heads, QUERIES=queries, D=d, D_BLOCK=padded(d),
        N=shape.keys, FEWEST=FEWEST, PARTS=MOST_OF_A_TILE, ROWS=_MERGED_ROWS, AT_ONCE=_MERGED_PARTS,
        MERGERS=_MERGERS, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


@launched
@triton.jit(
    do_not_specialize=["table_line", "window"],
    do_not_specialize_on_alignment=[
        "tile_rows",
        "tile_offsets",
        "part_numbers",
        "part_counts",
        "starts",
        "counts",
        "firsts",
        "slots",
    ],
)
def _attend_parts(
    q,
    keys,
    values,
    table,
    tile_rows,
    tile_offsets,
    part_numbers,
    part_counts,
    starts,
    counts,
    firsts,
    slots,
    outputs,
    sums,
    out,
    table_line,
    window,
    before,
    after,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    FEWEST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A part of a tile, and a KV head; row m of the products is query m // GROUP of the tile, head m % GROUP of the KV
    head's.
    """
    release_dependents(OVERLAP)
    item, kv_head = tl.program_id(0), tl.program_id(1)
    m, column, lane = tl.arange(0, M), tl.arange(0, D_BLOCK), tl.arange(0, N)
    wait_for_inputs(OVERLAP)
    row, offset = tl.load(tile_rows + item), tl.load(tile_offsets + item).to(tl.int32)
    number, parts = tl.load(part_numbers + item).to(tl.int32), tl.load(part_counts + item).to(tl.int32)
    start, count = tl.load(starts + row).to(tl.int32), tl.load(counts + row).to(tl.int32)
    first, slot = tl.load(firsts + row), tl.load(slots + row)
    seen_from, base, end, each, parts = _shares(start, offset, count, parts, window, WINDOWED, QUERIES, N, FEWEST)
    if number < parts:
        whole_end = base if WINDOWED else (start + offset + 1) // N * N  # what is before it, all queries see
        begin = base + number * each * N
        stop = tl.minimum(begin + each * N, end)
        query, head = offset + m // GROUP, kv_head * GROUP + m % GROUP
        exists = (m // GROUP < QUERIES) & (query < count)
        inside = exists[:, None] & (column < D)[None, :]
        where = (((first + query) * HEADS + head) * D)[:, None] + column[None, :]
        x = tl.load(q + where, inside, 0.0)
        blocks = table + slot * table_line
        position = start + query
        whole_begin, rest = tl.multiple_of(begin, N), tl.multiple_of(tl.maximum(begin, whole_end), N)
        highest, weights, total = attend_to(
            x, keys, values, blocks, position, kv_head, column, lane, whole_begin, tl.minimum(stop, whole_end), rest,
            stop, seen_from, end, window, before, after, CAPPED, WINDOWED, True, KV_HEADS, D, D_BLOCK, BLOCK_SIZE, M, N,
            STAGES,
        )  # fmt: skip
        if parts == 1:
            tl.store(out + where, (total / weights[:, None]).to(out.dtype.element_ty), inside)
        else:
            left = (item * QUERIES + m // GROUP) * HEADS + head
            tl.store(outputs + (left * D)[:, None] + column[None, :], total, inside)
            tl.store(sums + left * 2, highest, exists)
            tl.store(sums + left * 2 + 1, weights, exists)


@launched
@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=[
        "tile_rows",
        "tile_offsets",
        "part_numbers",
        "part_counts",
        "starts",
        "counts",
        "firsts",
    ],
)
def _merge_parts(
    tile_rows,
    tile_offsets,
    part_numbers,
    part_counts,
    starts,
    counts,
    firsts,
    outputs,
    sums,
    out,
    window,
    WINDOWED: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    N: tl.constexpr,
    FEWEST: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MERGERS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Every so many rows of a tile and a KV head: those of a part's program come after those of the part before."""
    release_dependents(OVERLAP)
    item, kv_head, merger = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_inputs(OVERLAP)
    number, parts = tl.load(part_numbers + item).to(tl.int32), tl.load(part_counts + item).to(tl.int32)
    if parts > 1:
        row, offset = tl.load(tile_rows + item), tl.load(tile_offsets + item).to(tl.int32)
        start, count = tl.load(starts + row).to(tl.int32), tl.load(counts + row).to(tl.int32)
        first = tl.load(firsts + row)
        mergers = parts * MERGERS  # those whose part is empty merge too
        _, _, _, _, parts = _shares(start, offset, count, parts, window, WINDOWED, QUERIES, N, FEWEST)
        rows = tl.where(parts > 1, GROUP * tl.minimum(count - offset, QUERIES), 0)
        one, some, column = tl.arange(0, PARTS), tl.arange(0, AT_ONCE), tl.arange(0, D_BLOCK)
        for at in range((number * MERGERS + merger) * ROWS, rows, mergers * ROWS):
            m = at + tl.arange(0, ROWS)
            query, head = m // GROUP, kv_head * GROUP + m % GROUP
            exists = m < rows
            left = ((item - number) * QUERIES + query) * HEADS + head  # of the tile's first part
            of_all = left[None, :] + one[:, None] * (QUERIES * HEADS)
            highest = tl.load(sums + of_all * 2, exists[None, :] & (one < parts)[:, None], float("-inf"))
            highest = tl.where(exists, tl.max(highest, 0), 0.0)
            weights = tl.zeros((ROWS,), tl.float32)
            total = tl.zeros((ROWS, D_BLOCK), tl.float32)
            for part in range(0, parts, AT_ONCE):
                theirs = left[None, :] + (part + some)[:, None] * (QUERIES * HEADS)
                read = exists[None, :] & (part + some < parts)[:, None]
                summed = tl.load(
                    outputs + (theirs * D)[:, :, None] + column[None, None, :],
                    read[:, :, None] & (column < D)[None, None, :],
                    0.0,
                )
                shrink = tl.exp2(tl.load(sums + theirs * 2, read, float("-inf")) - highest[None, :])
                weights += tl.sum(tl.load(sums + theirs * 2 + 1, read, 0.0) * shrink, 0)
                total += tl.sum(summed * shrink[:, :, None], 0)
            where = (((first + offset + query) * HEADS + head) * D)[:, None] + column[None, :]
            merged = total / tl.where(exists, weights, 1.0)[:, None]
            tl.store(out + where, merged.to(out.dtype.element_ty), exists[:, None] & (column < D)[None, :])


@triton.jit
def _shares(
    start,
    offset,
    count,
    parts,
    window,
    WINDOWED: tl.constexpr,
    QUERIES: tl.constexpr,
    N: tl.constexpr,
    FEWEST: tl.constexpr,
):
    """What a tile sees and how it is shared: the first position, where its tile of keys begins, the end, tiles of keys
    of a part, and how many parts are not empty, which is `parts` at most, and none for padding.
    """
    seen_from, base = 0, 0
    if WINDOWED:
        seen_from = tl.maximum(start + offset + 1 - window, 0)
        base = seen_from // N * N
    end = start + tl.minimum(offset + QUERIES, count)
    tiles = tl.where(offset < count, (end - base + N - 1) // N, 0)
    each = tl.maximum((tiles + parts - 1) // parts, FEWEST)
    return seen_from, base, end, each, (tiles + each - 1) // each
