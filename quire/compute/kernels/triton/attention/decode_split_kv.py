"""Computes decode attention over the paged cache with split KV (flash decoding; Dao et al. 2023).

One query reads its whole context once, 2 · context · kv_heads · d elements, and computes next to nothing with it.
Reading takes all the time, so every multiprocessor must read all the time. Contexts are therefore divided into about as
many equal splits as programs run at once, for any mix of lengths; the grid depends on the number of rows alone. A
program takes a split of one row and one KV head, whose query heads share what it reads and are the rows of its matrix
products. The last of a row's programs to end merges all splits in their order, so the result does not depend on which
program is last.

`plan_kv_splits` is one small kernel in each step, since only the device knows lengths. With many rows,
decode_large_batch.py takes the same splits where it supports the operands.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.attention_inputs import DecodeRows, Mask, PagedKV, PagedRows, Scores
from quire.compute.kernels.reference.paged_attention import SPLIT_OVERHEAD_TILES, DecodePartials
from quire.compute.kernels.triton.attention.decode_large_batch import decode_attention_large_batch, serves_large_batch
from quire.compute.kernels.triton.attention.masks import CAUSAL, WINDOW, mask_arguments, tile_mask, visible_range
from quire.compute.kernels.triton.attention.score_scaling import (
    load_slopes,
    padded_size,
    scaled_scores,
    score_factors,
    softmax_start,
    widened,
    with_slopes,
)
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.device_properties import multiprocessors
from quire.compute.kernels.triton.launching.launch import fast_launch, next_power_of_2

_MERGED = 8
"""The number of splits that the last program reads at a time."""
_PROGRAMS = 4
"""Programs of a multiprocessor at once; tuning/h200/tune_attention.py measures it."""
MIN_SPLIT_TILES = 2
"""The minimum tiles of a split, where a context has more: shorter splits take longer to merge than they save."""
_LONGEST = 2**31 - 1


@dataclass(frozen=True)
class _Shape:
    """How the work is divided into programs.

    Attributes:
        keys: The keys of a tile.
        warps: The warps of a program.
        stages: Tiles that are multiplied or on their way. Loads of block ids count as half of them.
    """

    keys: int
    warps: int
    stages: int


@functools.cache
def _shape(d: int, item: int) -> _Shape:
    if d > 256:  # not measured
        return _Shape(keys=16, warps=8, stages=2)
    if item == 4:
        return _Shape(keys=32, warps=8, stages=3)
    if d > 128:
        return _Shape(keys=32, warps=4, stages=3)
    return _Shape(keys=64, warps=2, stages=3)


def keys_of_tile(d: int, item: int) -> int:
    """Return the number of keys in a tile; splits begin at multiples of it."""
    return _shape(d, item).keys


def kv_splits_at_once(kv_heads: int, device: torch.device) -> int:
    """Return how many splits the device computes in one round of programs."""
    return -(-_PROGRAMS * multiprocessors(device) // kv_heads)


def kv_splits_for(rows: int, at_once: int) -> int:
    """Return the maximum number of splits for this many rows: one for each, and as many more as fill the device for one
    row.

    The number is chosen so that programs run in whole rounds as nearly as possible, since a last round of few programs
    leaves most of the device idle.
    """
    return max(rows, round((rows + at_once) / at_once) * at_once)


def plan_kv_splits(
    rows: PagedRows, decode: DecodeRows | None, mask: Mask, splits: Tensor, tile: int, at_once: int, min_tiles: int = 1
) -> None:
    """Implement reference/paged_attention.py's `plan_kv_splits`; all tensors are contiguous."""
    numbers, tokens = decode or (None, None)
    count = len(rows.slots) if numbers is None else len(numbers)
    kind, size = mask_arguments(mask._replace(two_sided=False))  # in a row of one token, nothing is behind it
    if kind == CAUSAL.value:
        kind, size = WINDOW.value, _LONGEST  # so that one kernel serves both
    overlap = can_overlap(splits.device)
    _plan_kv_splits[(1,)](
        rows.starts, rows.slots, numbers, tokens, splits, count, len(splits), at_once, size,
        KIND=kind, TILE=tile, MIN_SPLIT_TILES=min_tiles, SPLIT_OVERHEAD_TILES=SPLIT_OVERHEAD_TILES,
        ROWS=max(256, next_power_of_2(count)), COLUMNS=splits.shape[1], OVERLAP=overlap, num_warps=4,
        launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(
    do_not_specialize=["rows", "room", "at_once", "mask_size"],
    do_not_specialize_on_alignment=["starts", "slots", "decode_rows", "tokens"],
)
def _plan_kv_splits(
    starts, slots, decode_rows, tokens, splits, rows, room, at_once, mask_size,
    KIND: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr, SPLIT_OVERHEAD_TILES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Plan all splits in one program, with a lane for each row."""
    release_dependents(OVERLAP)
    lane = tl.arange(0, ROWS)
    inside = lane < rows
    wait_for_inputs(OVERLAP)
    row, token = lane, lane
    if decode_rows is not None:
        row = tl.load(decode_rows + lane, inside, -1).to(tl.int32)
        inside &= row >= 0
        token = tl.load(tokens + lane, inside, 0).to(tl.int32)
    length = tl.load(starts + row, inside, 0).to(tl.int32) + 1
    slot = tl.load(slots + row, inside, 0).to(tl.int32)
    seen_from, _ = visible_range(length - 1, length, length, mask_size, KIND)
    base = seen_from // TILE * TILE
    tiles = tl.where(inside, (length - base + TILE - 1) // TILE, 0)
    low = _tiles_per_split(tiles, room, MIN_SPLIT_TILES)
    high = _tiles_per_split(tiles, tl.minimum(tl.maximum(rows, at_once), room), MIN_SPLIT_TILES)
    if _cost(tiles, low, at_once, SPLIT_OVERHEAD_TILES) < _cost(tiles, high, at_once, SPLIT_OVERHEAD_TILES):
        high = low
    count = (tiles + high - 1) // high
    each = tl.where(inside, (tiles + count - 1) // tl.maximum(count, 1), 1)  # as even as tiles allow
    count = (tiles + each - 1) // each
    first = tl.cumsum(count, 0) - count
    for number in range(tl.max(count, 0)):
        own = splits + (first + number) * COLUMNS
        exists = number < count
        begin = base + number * each * TILE
        tl.store(own, token, exists)
        tl.store(own + 1, slot, exists)
        tl.store(own + 2, begin, exists)
        tl.store(own + 3, tl.minimum(begin + each * TILE, length), exists)
        tl.store(own + 4, seen_from, exists)
        tl.store(own + 5, first, exists)
        tl.store(own + 6, count, exists)
    for number in range(tl.sum(count, 0), room, ROWS):
        tl.store(splits + (number + lane) * COLUMNS + 6, 0, number + lane < room)


@triton.jit
def _tiles_per_split(tiles, room, MIN_SPLIT_TILES: tl.constexpr):
    """Return the fewest tiles in a split that leave no more splits than there is room for."""
    low = MIN_SPLIT_TILES
    high = tl.maximum(tl.max(tiles, 0), MIN_SPLIT_TILES)
    while low < high:
        middle = (low + high) // 2
        if tl.sum((tiles + middle - 1) // middle, 0) <= room:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def _cost(tiles, most, at_once, SPLIT_OVERHEAD_TILES: tl.constexpr):
    splits = tl.sum((tiles + most - 1) // most, 0)
    several = 2 * (tl.sum(tiles, 0) + SPLIT_OVERHEAD_TILES * splits) + most * at_once
    return tl.where(splits <= at_once, 2 * at_once * (most + SPLIT_OVERHEAD_TILES), several)


def decode_attention(
    q: Tensor, kv: PagedKV, block_table: Tensor, splits: Tensor, partials: DecodePartials, scores: Scores, out: Tensor,
    rows: int | None = None,
) -> None:  # fmt: skip
    """Implement reference/paged_attention.py's `decode_attention`; all tensors but the block table are contiguous."""
    keys, values, scales = kv
    assert all(map(Tensor.is_contiguous, (q, keys, values, splits, out)))
    assert splits.shape[0] <= partials.outputs.shape[0]
    if scores.slopes is None and serves_large_batch(q, keys, q.shape[0] if rows is None else rows):
        decode_attention_large_batch(q, kv, block_table, splits, partials, scores, out)
        return
    _, block_size, kv_heads, d = keys.shape
    heads = q.shape[1]
    group, d_block = heads // kv_heads, padded_size(d)
    shape = _shape(d, q.element_size())
    before, after = score_factors(scores)
    overlap = can_overlap(q.device)
    _decode_attention_split_kv[(splits.shape[0] * kv_heads,)](
        q, keys, values, block_table, splits, partials.outputs, partials.sums, partials.arrived, out,
        scales, scores.sinks, scores.slopes, block_table.stride(0), before, after,
        CAPPED=scores.cap is not None, HEADS=heads, KV_HEADS=kv_heads, GROUP=group,
        GROUP_BLOCK=next_power_of_2(group), M=padded_size(group), D=d, D_BLOCK=d_block,
        BLOCK_SIZE=block_size, COLUMNS=splits.shape[1], TILE=shape.keys, MERGED=_MERGED, STAGES=shape.stages,
        OVERLAP=overlap, num_warps=shape.warps, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=["splits", "sinks", "slopes"])
def _decode_attention_split_kv(
    q, keys, values, block_table, splits, outputs, sums, arrived, out, scales, sinks, slopes, block_table_stride,
    before, after,
    CAPPED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr, MERGED: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute one split and one KV head.

    `own` are the KV head's query heads, padded to the M rows of a product, of which GROUP exist.
    """
    release_dependents(OVERLAP)
    split, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    own, column, lane = tl.arange(0, M), tl.arange(0, D_BLOCK), tl.arange(0, TILE)
    exists = (own < GROUP)[:, None] & (column < D)[None, :]
    wait_for_inputs(OVERLAP)
    line = splits + split * COLUMNS  # all of it is asked for at once: volatile loads stay before the branch
    token, slot = tl.load(line, volatile=True).to(tl.int64), tl.load(line + 1, volatile=True).to(tl.int64)
    begin, end = tl.load(line + 2, volatile=True), tl.load(line + 3, volatile=True)
    seen_from = tl.load(line + 4, volatile=True)
    first, count = tl.load(line + 5, volatile=True), tl.load(line + 6, volatile=True)
    blocks = block_table + slot * block_table_stride
    if count > 0:
        head = kv_head * GROUP + own
        x = tl.load(q + ((token * HEADS + head) * D)[:, None] + column[None, :], exists, 0.0)
        highest, started = softmax_start(sinks, head, own < tl.where(split == first, GROUP, 0))
        weights = tl.where((lane == 0)[None, :], started[:, None], 0.0)  # summed over lanes at the end only
        total = tl.zeros((M, D_BLOCK), tl.float32)
        slope, query = load_slopes(slopes, head, own < GROUP), 0
        if slopes is not None:
            query = tl.load(splits + (first + count - 1) * COLUMNS + 3) - 1  # where the row's last split ends
        for at in tl.range(begin, end, TILE, num_stages=STAGES):
            position = at + lane
            seen = tile_mask(position, seen_from, end, WINDOW)
            block = tl.load(blocks + position // BLOCK_SIZE, seen, 0)
            place = (block * BLOCK_SIZE + position % BLOCK_SIZE) * (KV_HEADS * D) + kv_head * D
            where = place[:, None] + column[None, :]
            read = seen[:, None] & (column < D)[None, :]
            k = widened(tl.load(keys + where, read, 0.0), x.dtype)
            score = scaled_scores(tl.dot(x, tl.trans(k), input_precision="ieee"), before, after, CAPPED)
            score = with_slopes(score, slopes, slope, position, query)
            score = tl.where(seen[None, :], score, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(score, 1))
            shrink = tl.exp2(highest - new_highest)
            weight = tl.exp2(score - new_highest[:, None])
            v = widened(tl.load(values + where, read, 0.0), x.dtype)
            total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
            weights = weights * shrink[:, None] + weight
            highest = new_highest
        if scales is not None:
            total *= tl.load(scales + KV_HEADS + kv_head)
        sum_of_weights = tl.sum(weights, 1)
        result = out + ((token * HEADS + head) * D)[:, None] + column[None, :]
        if count == 1:
            tl.store(result, (total / sum_of_weights[:, None]).to(out.dtype.element_ty), exists)
        else:
            part = split * HEADS + head
            tl.store(outputs + (part * D)[:, None] + column[None, :], total, exists)
            tl.store(sums + part * 2, highest, own < GROUP)
            tl.store(sums + part * 2 + 1, sum_of_weights, own < GROUP)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrived + first * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
                tl.store(counter, 0)
                merged = merge_kv_splits(
                    outputs, sums, first, count, kv_head * GROUP, HEADS, GROUP, GROUP_BLOCK, D, D_BLOCK, MERGED
                )
                of_group = tl.arange(0, GROUP_BLOCK)
                of_out = out + ((token * HEADS + kv_head * GROUP + of_group) * D)[:, None] + column[None, :]
                tl.store(of_out, merged.to(out.dtype.element_ty), (of_group < GROUP)[:, None] & (column < D)[None, :])


@triton.jit
def merge_kv_splits(
    outputs, sums, first, count, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """Return [GROUP_BLOCK, D_BLOCK], the merged splits of a row, read MERGED at a time.

    Other programs' results are read past the multiprocessor's own cache, which may hold older values.
    """
    number, own, column = tl.arange(0, MERGED), tl.arange(0, GROUP_BLOCK), tl.arange(0, D_BLOCK)
    highest = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    weights = tl.zeros((GROUP_BLOCK,), tl.float32)
    total = tl.zeros((GROUP_BLOCK, D_BLOCK), tl.float32)
    for at in range(0, count, MERGED):
        left = (first + at + number)[:, None] * HEADS + head + own[None, :]  # [MERGED, GROUP_BLOCK]
        exists = (at + number < count)[:, None] & (own < GROUP)[None, :]
        their_highest = tl.load(sums + left * 2, exists, float("-inf"), cache_modifier=".cg")
        their_weights = tl.load(sums + left * 2 + 1, exists, 0.0, cache_modifier=".cg")
        part = tl.load(
            outputs + (left * D)[:, :, None] + column[None, None, :],
            exists[:, :, None] & (column < D)[None, None, :], 0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_highest = tl.maximum(highest, tl.max(their_highest, 0))
        new_highest = tl.where(own < GROUP, new_highest, 0.0)
        shrink = tl.exp2(highest - new_highest)
        share = tl.exp2(their_highest - new_highest[None, :])
        total = total * shrink[:, None] + tl.sum(part * share[:, :, None], 0)
        weights = weights * shrink + tl.sum(their_weights * share, 0)
        highest = new_highest
    return total / weights[:, None]
