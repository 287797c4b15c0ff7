"""Computes prefill attention with split KV, for few query tokens behind long contexts (Dao et al. 2023).

Where there are few tiles of queries (see prefill.py), one program for each leaves most of the GPU idle. Here a program
takes one split of a tile's keys and leaves a partial result in memory: for m rows of products, m · (d + 1) fp32
numbers, which are means of values and logarithms of sums of weights. A second kernel merges the splits of each tile in
their order, with as many programs as there are splits, each for its share of the tile's rows. A tile with one split
writes its outputs at once, and its merging programs return. In the grids, which are as large as the metadata is long, a
tile's KV heads are neighbours, so that programs of padding come last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.attention_inputs import KVSplits, Mask, PagedKV, PagedRows, QueryTiles, Scores
from quire.compute.kernels.reference.paged_attention import PrefillPartials
from quire.compute.kernels.triton.attention.masks import mask_arguments, visible_range
from quire.compute.kernels.triton.attention.prefill import attention_over_keys, tile_shape
from quire.compute.kernels.triton.attention.score_scaling import load_slopes, padded_size, score_factors, softmax_start
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.device_properties import multiprocessors
from quire.compute.kernels.triton.launching.launch import fast_launch

MIN_SPLIT_TILES = 4
"""The minimum key tiles of a split, where a window leaves fewer keys than the host knew of."""
MERGE_TILES = 6
"""The time that merging takes, in key tiles, where tiles are split at all."""
SHARED_SLOWDOWN = 1.4
"""The factor by which a key tile takes longer where two programs share a multiprocessor."""
MAX_SPLITS_OF_TILE = 32
_MOST = 64
"""The maximum number of splits of all tiles together."""
_AT_ONCE = 8
"""The number of splits that a merging program reads at once."""


def max_unshared_splits(kv_heads: int, device: torch.device) -> int:
    """Return how many splits, of all tiles together, can have a multiprocessor each."""
    return min(max(1, multiprocessors(device) // kv_heads), _MOST)


def max_splits(kv_heads: int, device: torch.device, at_once: int) -> int:
    """Return how many splits, of all tiles together, the device runs at once with `at_once` programs on a
    multiprocessor."""
    return min(max(1, at_once * multiprocessors(device) // kv_heads), _MOST)


def prefill_attention_split_kv(
    q: Tensor, kv: PagedKV, rows: PagedRows, tiles: QueryTiles, splits: KVSplits, queries: int,
    partials: PrefillPartials, mask: Mask, scores: Scores, out: Tensor,
) -> None:  # fmt: skip
    """Implement reference/paged_attention.py's `prefill_attention_split_kv`; all tensors but the block table are
    contiguous.

    `queries` comes from `queries_of_tile`.
    """
    keys, values, scales = kv
    block_table, slots, starts, counts = rows
    _, block_size, kv_heads, d = keys.shape
    heads, items = q.shape[1], len(tiles.rows)
    shape = tile_shape(d, q.element_size(), q.device)
    assert queries == shape.rows // (heads // kv_heads)
    columns = (tiles.rows, tiles.offsets, splits.numbers, splits.counts, starts, counts, tiles.first_tokens)
    assert all(map(Tensor.is_contiguous, (q, keys, values, *columns, slots, out)))
    before, after = score_factors(scores)
    overlap = can_overlap(q.device)
    left = (partials.outputs, partials.sums)
    kind, size = mask_arguments(mask)
    _prefill_attention_split_kv[(kv_heads, items)](
        q, keys, values, block_table, *columns, slots, *left, out, scales, scores.sinks, scores.slopes,
        block_table.stride(0), size, before, after,
        CAPPED=scores.cap is not None, KIND=kind, HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        QUERIES=queries, D=d, D_BLOCK=padded_size(d), BLOCK_SIZE=block_size, M=shape.rows, N=shape.keys,
        STAGES=shape.stages + shape.ahead, MIN_SPLIT_TILES=MIN_SPLIT_TILES, OVERLAP=overlap,
        num_warps=shape.warps, launch_pdl=overlap,
    )  # fmt: skip
    _merge_splits[(kv_heads, min(items, partials.outputs.shape[0] // queries))](
        *columns, *left, out, size,
        KIND=kind, HEADS=heads, GROUP=heads // kv_heads, QUERIES=queries, D=d, D_BLOCK=padded_size(d),
        M=shape.rows, N=shape.keys, MIN_SPLIT_TILES=MIN_SPLIT_TILES, AT_ONCE=_AT_ONCE, OVERLAP=overlap,
        num_warps=8, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(
    do_not_specialize=["block_table_stride", "mask_size"],
    do_not_specialize_on_alignment=[
        "tile_rows",
        "tile_offsets",
        "split_numbers",
        "split_counts",
        "starts",
        "counts",
        "first_tokens",
        "slots",
        "sinks",
        "slopes",
    ],
)
def _prefill_attention_split_kv(
    q, keys, values, block_table, tile_rows, tile_offsets, split_numbers, split_counts, starts, counts, first_tokens,
    slots, outputs, sums, out, scales, sinks, slopes, block_table_stride, mask_size, before, after,
    CAPPED: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute a split of a tile, and a KV head; rows of the products are as in `_prefill_attention`."""
    release_dependents(OVERLAP)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    m, column, lane = tl.arange(0, M), tl.arange(0, D_BLOCK), tl.arange(0, N)
    wait_for_inputs(OVERLAP)
    row, offset = tl.load(tile_rows + item), tl.load(tile_offsets + item).to(tl.int32)
    number, splits = tl.load(split_numbers + item).to(tl.int32), tl.load(split_counts + item).to(tl.int32)
    if splits == 0:
        return
    start, count = tl.load(starts + row).to(tl.int32), tl.load(counts + row).to(tl.int32)
    first, slot = tl.load(first_tokens + row), tl.load(slots + row)
    seen_from, base, end, each, splits = _kv_splits_of_tile(
        start, offset, count, splits, mask_size, KIND, QUERIES, N, MIN_SPLIT_TILES
    )
    if number >= splits:
        return
    begin = base + number * each * N
    query, head = offset + m // GROUP, kv_head * GROUP + m % GROUP
    exists = (m // GROUP < QUERIES) & (query < count)
    inside = exists[:, None] & (column < D)[None, :]
    where = (((first + query) * HEADS + head) * D)[:, None] + column[None, :]
    x = tl.load(q + where, inside, 0.0)
    highest, started = softmax_start(sinks, head, exists & (query < tl.where(number == 0, count, 0)))
    highest, weights, total = attention_over_keys(
        x, highest, started, keys, values, scales, slopes, load_slopes(slopes, head, head >= 0),
        block_table + slot * block_table_stride, start + query, kv_head, column, lane, begin,
        tl.minimum(begin + each * N, end), seen_from, end, start + count, mask_size, before, after, CAPPED, KIND, True,
        KV_HEADS, D, D_BLOCK, BLOCK_SIZE, M, N, STAGES,
    )  # fmt: skip
    mean = total / tl.where(weights > 0, weights, 1.0)[:, None]
    if splits == 1:
        tl.store(out + where, mean.to(out.dtype.element_ty), inside)
    else:
        left = (item * QUERIES + m // GROUP) * HEADS + head
        tl.store(outputs + (left * D)[:, None] + column[None, :], mean, inside)
        tl.store(sums + left, highest + tl.log2(weights), exists)


@fast_launch
@triton.jit(
    do_not_specialize=["mask_size"],
    do_not_specialize_on_alignment=[
        "tile_rows",
        "tile_offsets",
        "split_numbers",
        "split_counts",
        "starts",
        "counts",
        "first_tokens",
    ],
)
def _merge_splits(
    tile_rows, tile_offsets, split_numbers, split_counts, starts, counts, first_tokens, outputs, sums, out, mask_size,
    KIND: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    D_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr, AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge a share of the rows of a tile and a KV head, which have as many programs as splits.

    The program reads from rows `left` of the splits' results and writes rows `there` of the output. The code is
    arranged so that it reads the results while it still finds out how many splits and rows there are.
    """
    release_dependents(OVERLAP)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(OVERLAP)
    row, offset = tl.load(tile_rows + item), tl.load(tile_offsets + item).to(tl.int32)
    number, dealt = tl.load(split_numbers + item).to(tl.int32), tl.load(split_counts + item).to(tl.int32)
    if dealt < 2:
        return
    start, count = tl.load(starts + row).to(tl.int32), tl.load(counts + row).to(tl.int32)
    first = tl.load(first_tokens + row)
    _, _, _, _, splits = _kv_splits_of_tile(start, offset, count, dealt, mask_size, KIND, QUERIES, N, MIN_SPLIT_TILES)
    queries = tl.where(splits > 1, tl.minimum(count - offset, QUERIES), 0)
    left = (item - number) * QUERIES * HEADS + kv_head * GROUP  # of the tile's first split
    there = (first + offset) * HEADS + kv_head * GROUP
    column = tl.arange(0, D_BLOCK)
    ROWS: tl.constexpr = M // AT_ONCE
    for at in range(number * ROWS, QUERIES * GROUP, dealt * ROWS):
        m = at + tl.arange(0, ROWS)
        query, line = m // GROUP, m // GROUP * HEADS + m % GROUP
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        weights = tl.zeros((ROWS,), tl.float32)
        total = tl.zeros((ROWS, D_BLOCK), tl.float32)
        for begin in range(0, dealt, AT_ONCE):
            means, sizes = (), ()  # the larger ones first, so that all are on their way before one is waited for
            for split in tl.static_range(AT_ONCE):
                cells = ((left + line + (begin + split) * (QUERIES * HEADS)) * D)[:, None] + column[None, :]
                readable = (query < tl.where(begin + split < dealt, QUERIES, 0))[:, None] & (column < D)[None, :]
                means += (tl.load(outputs + cells, readable, 0.0),)  # type: ignore[assignment]
            for split in tl.static_range(AT_ONCE):
                theirs = left + line + (begin + split) * (QUERIES * HEADS)
                readable = query < tl.where(begin + split < dealt, QUERIES, 0)
                sizes += (tl.load(sums + theirs, readable, 0.0),)  # type: ignore[assignment]
            higher = highest
            for split in tl.static_range(AT_ONCE):
                written = query < tl.where(begin + split < splits, queries, 0)
                higher = tl.where(written, tl.maximum(higher, sizes[split]), higher)
            basis = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(highest - basis)
            weights, total, highest = weights * shrink, total * shrink[:, None], higher
            for split in tl.static_range(AT_ONCE):
                written = query < tl.where(begin + split < splits, queries, 0)  # elsewhere memory holds anything
                weight = tl.where(written, tl.exp2(sizes[split] - basis), 0.0)
                weights += weight
                total += tl.where(written[:, None], means[split], 0.0) * weight[:, None]
        where = ((there + line) * D)[:, None] + column[None, :]
        merged = (total / weights[:, None]).to(out.dtype.element_ty)
        tl.store(out + where, merged, (query < queries)[:, None] & (column < D)[None, :])


@triton.jit
def _kv_splits_of_tile(
    start, offset, count, splits, mask_size,
    KIND: tl.constexpr, QUERIES: tl.constexpr, N: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr,
):  # fmt: skip
    """Return what a tile sees and how it is split.

    The result is the first position, where its tile of keys begins, the end, key tiles of a split, and the number of
    splits that are not empty, at most `splits`, and 0 for padding.
    """
    seen_from, end = visible_range(
        start + offset, start + tl.minimum(offset + QUERIES, count), start + count, mask_size, KIND
    )
    base = seen_from // N * N
    tiles = tl.where(offset < count, (end - base + N - 1) // N, 0)
    each = tl.maximum((tiles + splits - 1) // splits, MIN_SPLIT_TILES)
    return seen_from, base, end, each, (tiles + each - 1) // each
