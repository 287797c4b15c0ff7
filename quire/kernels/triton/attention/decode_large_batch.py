"""Attention of many rows of one token on Hopper: programs of one warp that stay, and read ahead across ends of splits.

It computes the same as `_decode_attention_split_kv`, of the same splits, and reads as much: keys and values once,
which is 2 · context · kv_heads · d elements a row. With many rows most splits are short, some hundred positions.
Programs of their own would begin by looking up a line, then block ids, then waiting for its first keys, and end with
nothing on its way from memory. Here a grid of as many programs as the GPU holds takes split after split. While one
tile is multiplied the next two are on their way, of the same split or of the one after it, whose line and block ids
were asked for one step sooner: reading never pauses.

A program is one warp. No warp waits for another, and the 16 rows that the matrix units take at least are query heads of
one KV head. A unit of work is a split and a KV head; a program's units are a grid apart. What several splits of a row
leave is merged as in decode_split_kv.py, by the last program to end, in the order of splits: the result does not depend
on who was last.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from quire.kernels.reference.paged_attention import DecodePartials
from quire.kernels.triton.attention.score_scaling import score_factors
from quire.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.kernels.triton.launching.device_properties import is_sm_90, multiprocessors
from quire.kernels.triton.launching.launch import fast_launch, next_power_of_2

ask_for = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # names before Triton 3.9
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

MANY_ROWS = 64
"""From which on this is faster than a program for each split: measured on an H200, amid a layer."""
_PROGRAMS = 4
"""Of a multiprocessor: as many as have room for their tiles."""
_STAGES = gl.constexpr(3)
"""Tiles of a program: one that is multiplied, the others on their way."""
_TILE = 4096
"""Elements of a tile of keys: 8 KiB, and as much of values."""
_MOST_BLOCKS = 4
"""Of a tile."""
_M = gl.constexpr(16)
"""Query heads of a product, of which those of a KV head exist."""
_MERGED = gl.constexpr(8)
"""Splits that the last program reads at a time."""
_SUMS = 512
"""Sums of values that it reads of each: all of them take half of its threads' registers."""
_DTYPES = (torch.bfloat16, torch.float16)


def serves_large_batch(q: Tensor, keys: Tensor, rows: int) -> bool:
    """Whether the kernel exists for such operands, and is the fastest.

    Args:
        q, keys: See the reference's decode_attention.
        rows: Of one token.
    """
    _, block_size, kv_heads, d = keys.shape
    return (
        rows >= MANY_ROWS
        and d in (64, 128, 256)
        and q.shape[1] // kv_heads <= _M.value
        and q.dtype in _DTYPES
        and keys.dtype == q.dtype
        and is_sm_90(q.device)
        and supports_blocks(block_size, d)
    )


def supports_blocks(block_size: int, d: int) -> bool:
    """Whether tiles are made of a few whole blocks, or lie within one."""
    tile = _TILE // d
    if block_size % tile == 0:
        return True
    return block_size % 8 == 0 and tile % block_size == 0 and tile // block_size <= _MOST_BLOCKS


def decode_attention_large_batch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    splits: Tensor,
    partials: DecodePartials,
    out: Tensor,
    scale: float,
    cap: float | None,
) -> None:
    """The reference's decode_attention. All but the block table are contiguous, and begin at 16-byte addresses. Splits
    begin at multiples of whole tiles, as `keys_of_tile` in decode_split_kv.py has them."""
    _, block_size, kv_heads, d = keys.shape
    heads = q.shape[1]
    group_block = next_power_of_2(heads // kv_heads)
    units = splits.shape[0] * kv_heads
    before, after = score_factors(scale, cap)
    overlap = can_overlap(q.device)
    _decode_attention_large_batch[(min(units, _PROGRAMS * multiprocessors(q.device)),)](
        q, keys, values, block_table, splits, partials.outputs, partials.sums, partials.arrived, out,
        block_table.stride(0), units, before, after,
        CAPPED=cap is not None, HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads, GROUP_BLOCK=group_block, D=d,
        BLOCK_SIZE=block_size, COLUMNS=splits.shape[1], TILE=_TILE // d,
        COLUMNS_MERGED=min(d, _SUMS // group_block), OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@gluon.jit(do_not_specialize=["block_table_stride", "units"], do_not_specialize_on_alignment=["splits"])
def _decode_attention_large_batch(
    q,
    keys,
    values,
    block_table,
    splits,
    outputs,
    sums,
    arrived,
    out,
    block_table_stride,
    units,
    before,
    after,
    CAPPED: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_BLOCK: gl.constexpr,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILE: gl.constexpr,
    COLUMNS_MERGED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Every so many units. Splits that do not exist stand behind all others: the first of them ends a program."""
    release_dependents(OVERLAP)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dtype: gl.constexpr = out.dtype.element_ty
    k = gl.allocate_shared_memory(dtype, [_STAGES, TILE, D], swizzled)
    v = gl.allocate_shared_memory(dtype, [_STAGES, TILE, D], swizzled)
    shape: gl.constexpr = (KV_HEADS, D, BLOCK_SIZE, TILE)  # of caches, and how many keys are read at a time
    lines = (splits, units, gl.num_programs(0))
    caches = (keys, values, k, v)
    tables = (block_table, block_table_stride)
    own, column = gl.arange(0, _M, gl.SliceLayout(1, mma)), gl.arange(0, D, gl.SliceLayout(0, mma))
    lane = gl.arange(0, TILE, gl.SliceLayout(0, mma))
    unit = gl.program_id(0)
    wait_for_inputs(OVERLAP)
    line = _load_split(lines, unit, KV_HEADS, COLUMNS, TILE)
    ahead = _first_read(lines, unit, line, tables, shape, COLUMNS)
    for number in gl.static_range(_STAGES - 1):
        ahead = _prefetch_tile(ahead, lines, tables, caches, number, shape, COLUMNS)
    x = _load_queries(q, unit, line, HEADS, KV_HEADS, GROUP, D, left)
    stage, into = 0, _STAGES - 1
    token, _, begin, end, seen_from, first, count = line
    while count > 0:
        kv_head = unit % KV_HEADS
        following = _load_split(lines, unit + gl.num_programs(0), KV_HEADS, COLUMNS, TILE)
        highest = gl.full([_M], float("-inf"), gl.float32, gl.SliceLayout(1, mma))
        weights = gl.zeros([_M, TILE], gl.float32, mma)  # summed over lanes at the end only
        total = gl.zeros([_M, D], gl.float32, mma)
        for at in range(begin, end, TILE):
            ahead = _prefetch_tile(ahead, lines, tables, caches, into, shape, COLUMNS)
            async_copy.wait_group(_STAGES - 1)
            barrier()  # what a thread asked for, others multiply
            score = mma_v2(x, k.index(stage).permute((1, 0)).load(right), gl.zeros([_M, TILE], gl.float32, mma))
            if CAPPED:
                score = after - 2.0 * after / (gl.exp2(score * before) + 1.0)
            else:
                score = score * before
            if (at < seen_from) | (at + TILE > end):
                seen = (at + lane >= seen_from) & (at + lane < end)
                score = gl.where(seen[None, :], score, float("-inf"))
            new_highest = gl.maximum(highest, gl.max(score, 1))
            shrink = gl.exp2(highest - new_highest)
            weight = gl.exp2(score - new_highest[:, None])
            scaled = total * shrink[:, None]
            total = mma_v2(gl.convert_layout(weight.to(dtype), left), v.index(stage).load(right), scaled)
            weights = weights * shrink[:, None] + weight
            highest = new_highest
            stage, into = _next(stage), _next(into)
        x = _load_queries(q, unit + gl.num_programs(0), following, HEADS, KV_HEADS, GROUP, D, left)
        sum_of_weights = gl.sum(weights, 1)
        head = kv_head * GROUP + own
        if count == 1:
            result = out + ((token.to(gl.int64) * HEADS + head) * D)[:, None] + column[None, :]
            gl.store(result, (total / sum_of_weights[:, None]).to(dtype), (own < GROUP)[:, None])
        else:
            part = unit // KV_HEADS * HEADS + head
            gl.store(outputs + (part * D)[:, None] + column[None, :], total, (own < GROUP)[:, None])
            gl.store(sums + part * 2, highest, own < GROUP)
            gl.store(sums + part * 2 + 1, sum_of_weights, own < GROUP)
            barrier()  # all threads have stored before one of them says so
            counter = arrived + first * KV_HEADS + kv_head
            if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
                gl.store(counter, 0)
                result = out + (token.to(gl.int64) * HEADS + kv_head * GROUP) * D
                _merge_kv_splits(
                    outputs, sums, first, count, kv_head * GROUP, result, HEADS, GROUP, GROUP_BLOCK, D, COLUMNS_MERGED
                )
        unit += gl.num_programs(0)
        token, _, begin, end, seen_from, first, count = following


@gluon.jit
def _next(stage):
    return gl.where(stage == _STAGES - 1, 0, stage + 1)


@gluon.jit
def _load_split(lines, unit, KV_HEADS: gl.constexpr, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """A unit's split: token, slot, first position, end, the first position that is seen, the row's first split and its
    number of splits. That is 0 where there is none; what else stands in such a line may be anything. A window may begin
    behind the split's first tiles: a tile of which nothing is seen has no highest score.
    """
    splits, units, _ = lines
    own = splits + gl.minimum(unit, units - 1) // KV_HEADS * COLUMNS  # all of it is asked for at once: volatile
    token, slot = gl.load(own, volatile=True), gl.load(own + 1, volatile=True)
    begin, end = gl.load(own + 2, volatile=True), gl.load(own + 3, volatile=True)
    seen_from, first = gl.load(own + 4, volatile=True), gl.load(own + 5, volatile=True)
    count = gl.where(unit < units, gl.load(own + 6, volatile=True), 0)
    there = count > 0
    begin = gl.where(there, gl.maximum(begin, seen_from // TILE * TILE), 0)
    token, slot = gl.where(there, token, 0), gl.where(there, slot, 0)
    end, seen_from = gl.where(there, end, 1), gl.where(there, seen_from, 0)
    return token, slot, begin, end, seen_from, first, count


@gluon.jit
def _load_queries(
    q, unit, line, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, left: gl.constexpr
):
    """[_M, D] of the unit's token and KV head."""
    own, column = gl.arange(0, _M, gl.SliceLayout(1, left)), gl.arange(0, D, gl.SliceLayout(0, left))
    token, _, _, _, _, _, count = line
    begin = (token.to(gl.int64) * HEADS + unit % KV_HEADS * GROUP + own) * D
    exists = (own < GROUP) & (count > 0)
    return gl.load(q + begin[:, None] + column[None, :], exists[:, None], 0.0)


@gluon.jit
def _first_read(lines, unit, line, tables, shape: gl.constexpr, COLUMNS: gl.constexpr):
    """What is read first: a unit, where in its split, the ids of the tile's blocks, the split, and the one after it."""
    KV_HEADS: gl.constexpr = shape[0]
    TILE: gl.constexpr = shape[3]
    block_table, block_table_stride = tables
    _, _, programs = lines
    _, slot, begin, end, _, _, _ = line
    following = _load_split(lines, unit + programs, KV_HEADS, COLUMNS, TILE)
    blocks = block_table + slot.to(gl.int64) * block_table_stride
    return unit, begin, _block_ids(blocks, begin, end, shape), blocks, line, following


@gluon.jit
def _prefetch_tile(ahead, lines, tables, caches, into, shape: gl.constexpr, COLUMNS: gl.constexpr):
    """Ask for a tile, if there is one more; what is read after it."""
    KV_HEADS: gl.constexpr = shape[0]
    TILE: gl.constexpr = shape[3]
    block_table, block_table_stride = tables
    _, _, programs = lines
    unit, at, ids, blocks, line, following = ahead
    _, slot, _, end, seen_from, _, count = line
    if count > 0:
        _copy_tile_async(caches, ids, at, seen_from, end, unit % KV_HEADS, into, shape)
        at += TILE
        if at >= end:
            unit += programs
            line = following
            _, slot, at, end, _, _, _ = line
            blocks = block_table + slot.to(gl.int64) * block_table_stride
            following = _load_split(lines, unit + programs, KV_HEADS, COLUMNS, TILE)
        ids = _block_ids(blocks, at, end, shape)
    async_copy.commit_group()
    return unit, at, ids, blocks, line, following


@gluon.jit
def _block_ids(blocks, at, end, shape: gl.constexpr):
    """Of the tile's blocks, four; where the split ends sooner, the last one's again."""
    BLOCK_SIZE: gl.constexpr = shape[2]
    NUMBER: gl.constexpr = shape[3] // BLOCK_SIZE
    number, last = at // BLOCK_SIZE, (end - 1) // BLOCK_SIZE
    id_0 = gl.load(blocks + gl.minimum(number, last))
    id_1, id_2, id_3 = id_0, id_0, id_0
    if NUMBER > 1:
        id_1 = gl.load(blocks + gl.minimum(number + 1, last))
    if NUMBER > 2:
        id_2 = gl.load(blocks + gl.minimum(number + 2, last))
        id_3 = gl.load(blocks + gl.minimum(number + 3, last))
    return id_0, id_1, id_2, id_3


@gluon.jit
def _copy_tile_async(caches, ids, at, seen_from, end, kv_head, into, shape: gl.constexpr):
    """Ask for a tile of keys and values, 16 bytes a thread at a time. What is not seen is not read: it becomes 0."""
    keys, values, k, v = caches
    KV_HEADS: gl.constexpr = shape[0]
    D: gl.constexpr = shape[1]
    BLOCK_SIZE: gl.constexpr = shape[2]
    TILE: gl.constexpr = shape[3]
    ROWS: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, D, gl.SliceLayout(0, layout))
    offset = row[:, None] * (KV_HEADS * D) + column[None, :]
    inside = at % BLOCK_SIZE * (KV_HEADS * D) + kv_head * D
    whole = (at >= seen_from) & (at + TILE <= end)
    for number in gl.static_range(TILE // ROWS):
        base = ids[number] * (BLOCK_SIZE * KV_HEADS * D) + inside
        base = gl.multiple_of(base, 64)  # which Triton does not see in all cases
        k_rows = k.index(into).slice(number * ROWS, ROWS)
        v_rows = v.index(into).slice(number * ROWS, ROWS)
        if whole:
            ask_for(k_rows, keys + base + offset)
            ask_for(v_rows, values + base + offset)
        else:
            position = at + number * ROWS + row
            seen = ((position >= seen_from) & (position < end))[:, None]
            ask_for(k_rows, keys + base + offset, mask=seen)
            ask_for(v_rows, values + base + offset, mask=seen)


@gluon.jit
def _merge_kv_splits(
    outputs,
    sums,
    first,
    count,
    head,
    result,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_BLOCK: gl.constexpr,
    D: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """A row's splits, WIDTH columns after WIDTH columns. What others wrote is read past the nearest cache."""
    lanes: gl.constexpr = min(WIDTH // 4, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 // lanes, lanes], [1, 1, 1], [2, 1, 0])
    of_sums: gl.constexpr = gl.SliceLayout(2, layout)
    of_total: gl.constexpr = gl.SliceLayout(0, layout)
    number, own = (
        gl.arange(0, _MERGED, gl.SliceLayout(1, of_sums)),
        gl.arange(0, GROUP_BLOCK, gl.SliceLayout(0, of_sums)),
    )
    row, column = (
        gl.arange(0, GROUP_BLOCK, gl.SliceLayout(1, of_total)),
        gl.arange(0, WIDTH, gl.SliceLayout(0, of_total)),
    )
    exists = (row < GROUP)[:, None]
    for begin in range(0, D, WIDTH):
        highest = gl.full([GROUP_BLOCK], float("-inf"), gl.float32, gl.SliceLayout(0, of_sums))
        weights = gl.zeros([GROUP_BLOCK], gl.float32, gl.SliceLayout(0, of_sums))
        total = gl.zeros([GROUP_BLOCK, WIDTH], gl.float32, of_total)
        for at in range(0, count, _MERGED):
            place = (first + at + number)[:, None] * HEADS + head + own[None, :]  # [_MERGED, GROUP_BLOCK]
            there = (at + number < count)[:, None] & (own < GROUP)[None, :]
            their_highest = gl.load(sums + place * 2, there, float("-inf"), cache_modifier=".cg")
            their_weights = gl.load(sums + place * 2 + 1, there, 0.0, cache_modifier=".cg")
            where = (place * D + begin)[:, :, None] + gl.expand_dims(column[None, :], 0)
            part = gl.load(outputs + where, there[:, :, None], 0.0, cache_modifier=".cg")
            new_highest = gl.maximum(highest, gl.max(their_highest, 0))
            new_highest = gl.where(own < GROUP, new_highest, 0.0)
            shrink = gl.exp2(highest - new_highest)
            share = gl.exp2(their_highest - new_highest[None, :])
            of_rows = gl.convert_layout(shrink, row.type.layout)
            total = total * of_rows[:, None] + gl.sum(part * share[:, :, None], 0)
            weights = weights * shrink + gl.sum(their_weights * share, 0)
            highest = new_highest
        total = total / gl.convert_layout(weights, row.type.layout)[:, None]
        gl.store(result + row[:, None] * D + begin + column[None, :], total.to(result.dtype.element_ty), exists)
