"""Decode attention for many rows on Hopper, by persistent one-warp programs that prefetch across splits.

The results, the splits and the reads are those of `_decode_attention_split_kv`: keys and values are read once, 2 ·
context · kv_heads · d elements for each row. With many rows most splits are short, some hundred positions. If each
split had a program, it would begin by looking up a line, then block ids, then waiting for its first keys, and end with
nothing on its way from memory. Here a grid of as many programs as the GPU holds takes split after split. While one tile
is multiplied, the next two are on their way, from the same split or the next one, whose line and block ids were
requested one step sooner, so reading never pauses.

A program is one warp, so no warp waits for another. The matrix units take at least 16 rows, which are query heads of
one KV head. A unit of work is a split and a KV head; a program's units are a grid apart. The last program of a row to
end merges its splits in their order, as in decode_split_kv.py, so the result does not depend on which program is last.

Caches of 8-bit elements are read as pairs, so the same scheme works with half of the bytes and more programs; see
eight_bit_operands.py for how they are multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from quire.compute.kernels.reference.attention_inputs import PagedKV, Scores
from quire.compute.kernels.reference.paged_attention import DecodePartials
from quire.compute.kernels.triton.attention.decode_merge import merge_kv_splits
from quire.compute.kernels.triton.attention.decode_prefetch import first_read, load_split, prefetch_tile
from quire.compute.kernels.triton.attention.decode_products import (
    M,
    joined,
    load_queries,
    no_total,
    products_with_keys,
    with_values,
)
from quire.compute.kernels.triton.attention.masks import WINDOW, tile_mask
from quire.compute.kernels.triton.attention.score_scaling import score_factors, sink_start
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.device_properties import is_sm_90, multiprocessors
from quire.compute.kernels.triton.launching.launch import fast_launch, next_power_of_2

barrier = getattr(gl, "barrier", None) or gl.thread_barrier

MANY_ROWS = 64
"""The number of rows from which this kernel beats one program for each split, measured within a layer on an H200."""
MANY_ROWS_8_BIT = 4
"""The number of rows from which this kernel is used for caches of 8-bit elements.

It is faster with 8 rows, and slower with one row of a short context. It is also faster where other kernels run beside
it, which `rows` = 0 says (see the reference's decode_attention).
"""
_PROGRAMS, _PROGRAMS_8_BIT = 4, 8
"""Programs for each multiprocessor: as many as have room for their tiles.

With 8-bit elements only half as many run if each would have a single unit, since reading pauses between programs.
"""
_STAGES = 3
"""Tiles that a program holds: it multiplies one while the others are on their way."""
_TILE = 4096
"""Elements in a tile of keys, and in one of values: 8 KiB each, or 4 KiB in a cache of 8-bit elements."""
_MAX_BLOCKS = 4
"""The maximum number of cache blocks that a tile may span."""
_SUMS = 512
"""Sums of values that a row's last program reads from each split at a time; they fill half of its threads'
registers."""
_DTYPES = (torch.bfloat16, torch.float16)
_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
"""The names in the kernel for the dtypes of 8-bit caches."""


def serves_large_batch(q: Tensor, keys: Tensor, rows: int) -> bool:
    """Whether the kernel supports these operands and is the fastest for them.

    Args:
        q, keys: As in the reference's decode_attention.
        rows: The maximum number of rows in the step; 0 where other kernels run beside this one.
    """
    _, block_size, kv_heads, d = keys.shape
    narrow = keys.dtype in _KINDS
    return (
        (rows >= MANY_ROWS or (narrow and (rows >= MANY_ROWS_8_BIT or not rows)))
        and d in ((64, 128) if narrow else (64, 128, 256))  # 256 of 8 bits would not fit into registers
        and q.shape[1] // kv_heads <= M.value
        and q.dtype in _DTYPES
        and (narrow or keys.dtype == q.dtype)
        and is_sm_90(q.device)
        and supports_blocks(block_size, d)
    )


def supports_blocks(block_size: int, d: int) -> bool:
    """Whether tiles consist of a few whole blocks, or lie within one."""
    tile = _TILE // d
    if block_size % tile == 0:
        return True
    return block_size % 8 == 0 and tile % block_size == 0 and tile // block_size <= _MAX_BLOCKS


def decode_attention_large_batch(
    q: Tensor, kv: PagedKV, block_table: Tensor, splits: Tensor, partials: DecodePartials, scores: Scores, out: Tensor
) -> None:
    """Compute attention of one query token for each row; arguments as in reference/paged_attention.py.

    All tensors but the block table are contiguous and begin at 16-byte addresses. Splits begin at multiples of whole
    tiles (`keys_of_tile` in decode_split_kv.py).
    """
    keys, values, scales = kv
    _, block_size, kv_heads, d = keys.shape
    heads = q.shape[1]
    group_block = next_power_of_2(heads // kv_heads)
    units = splits.shape[0] * kv_heads
    before, after = score_factors(scores)
    overlap = can_overlap(q.device)
    kind = _KINDS.get(keys.dtype, "")
    at_once = _PROGRAMS * multiprocessors(q.device)
    if kind:
        at_once = _programs_8_bit(units, multiprocessors(q.device))
        q, keys, values = q.view(torch.int32), keys.view(torch.int16), values.view(torch.int16)
    _decode_attention_large_batch[(min(units, at_once),)](
        q, keys, values, block_table, splits, partials.outputs, partials.sums, partials.arrived, out, scales,
        scores.sinks, block_table.stride(0), units, before, after,
        CAPPED=scores.cap is not None, KIND=kind, HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        GROUP_BLOCK=group_block, D=d, BLOCK_SIZE=block_size, COLUMNS=splits.shape[1],
        TILE=_TILE // d, STAGES=_STAGES, COLUMNS_MERGED=min(d, _SUMS // group_block),
        OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
    )  # fmt: skip


def _programs_8_bit(units: int, processors: int) -> int:
    most = _PROGRAMS_8_BIT * processors
    return most if units > most else most // 2


@fast_launch
@gluon.jit(do_not_specialize=["block_table_stride", "units"], do_not_specialize_on_alignment=["splits", "sinks"])
def _decode_attention_large_batch(
    q, keys, values, block_table, splits, outputs, sums, arrived, out, scales, sinks, block_table_stride, units,
    before, after,
    CAPPED: gl.constexpr, KIND: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    GROUP_BLOCK: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, COLUMNS: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, COLUMNS_MERGED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Compute every n-th unit, where n is the number of programs.

    Splits that do not exist come after all others: the first of them ends a program.
    """
    release_dependents(OVERLAP)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dtype: gl.constexpr = out.dtype.element_ty
    WORDS: gl.constexpr = D // 2 if KIND != "" else D  # of 16 bits, of a head
    k = gl.allocate_shared_memory(keys.dtype.element_ty, [STAGES, TILE, WORDS], swizzled)
    v = gl.allocate_shared_memory(keys.dtype.element_ty, [STAGES, TILE, WORDS], swizzled)
    shape: gl.constexpr = (KV_HEADS, WORDS, BLOCK_SIZE, TILE)  # of caches, and how many keys are read at a time
    lines = (splits, units, gl.num_programs(0))
    caches = (keys, values, k, v)
    tables = (block_table, block_table_stride)
    own = gl.arange(0, M, gl.SliceLayout(1, mma))
    lane = gl.arange(0, TILE, gl.SliceLayout(0, mma))
    unit = gl.program_id(0)
    wait_for_inputs(OVERLAP)
    line = load_split(lines, unit, KV_HEADS, COLUMNS, TILE)
    ahead = first_read(lines, unit, line, tables, shape, COLUMNS)
    for number in gl.static_range(STAGES - 1):
        ahead = prefetch_tile(ahead, lines, tables, caches, number, shape, COLUMNS)
    x, factor = load_queries(q, unit, line, before, HEADS, KV_HEADS, GROUP, WORDS, KIND, dtype, mma)
    stage, into = 0, STAGES - 1
    token, _, begin, end, seen_from, first, count = line
    while count > 0:
        kv_head = unit % KV_HEADS
        following = load_split(lines, unit + gl.num_programs(0), KV_HEADS, COLUMNS, TILE)
        highest = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, mma))
        weights = gl.zeros([M, TILE], gl.float32, mma)  # summed over lanes at the end only
        if sinks is not None:
            is_first = own < gl.where(unit // KV_HEADS == first, GROUP, 0)
            highest, started = sink_start(sinks, kv_head * GROUP + own, is_first)
            weights = gl.where((lane == 0)[None, :], started[:, None], weights)
        total = no_total(WORDS, KIND, mma)
        for at in range(begin, end, TILE):
            ahead = prefetch_tile(ahead, lines, tables, caches, into, shape, COLUMNS)
            async_copy.wait_group(STAGES - 1)
            barrier()  # what a thread asked for, others multiply
            score = products_with_keys(x, k.index(stage), TILE, KIND, mma)
            if CAPPED:
                score = after - 2.0 * after / (gl.exp2(score * factor) + 1.0)
            else:
                score = score * factor
            if (at < seen_from) | (at + TILE > end):
                seen = tile_mask(at + lane, seen_from, end, WINDOW)
                score = gl.where(seen[None, :], score, float("-inf"))
            new_highest = gl.maximum(highest, gl.max(score, 1))
            shrink = gl.exp2(highest - new_highest)
            weight = gl.exp2(score - new_highest[:, None])
            total = with_values(total, weight, v.index(stage), shrink, KIND, dtype, mma)
            weights = weights * shrink[:, None] + weight
            highest = new_highest
            stage, into = _next(stage, STAGES), _next(into, STAGES)
        x, factor = load_queries(
            q, unit + gl.num_programs(0), following, before, HEADS, KV_HEADS, GROUP, WORDS, KIND, dtype, mma
        )
        sum_of_weights = gl.sum(weights, 1)
        made = joined(total, KIND, D)
        if scales is not None:
            made = made * gl.load(scales + KV_HEADS + kv_head)
        whose = gl.arange(0, M, gl.SliceLayout(1, made.type.layout))
        head = kv_head * GROUP + whose
        column = gl.arange(0, D, gl.SliceLayout(0, made.type.layout))[None, :]
        if count == 1:
            made = made / gl.convert_layout(sum_of_weights, whose.type.layout)[:, None]
            result = out + ((token.to(gl.int64) * HEADS + head) * D)[:, None] + column
            gl.store(result, made.to(dtype), (whose < GROUP)[:, None])
        else:
            part = unit // KV_HEADS * HEADS
            gl.store(outputs + ((part + head) * D)[:, None] + column, made, (whose < GROUP)[:, None])
            place = sums + (part + kv_head * GROUP + own) * 2
            gl.store(place, highest, own < GROUP)
            gl.store(place + 1, sum_of_weights, own < GROUP)
            barrier()  # all threads have stored before one of them says so
            counter = arrived + first * KV_HEADS + kv_head
            if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
                gl.store(counter, 0)
                result = out + (token.to(gl.int64) * HEADS + kv_head * GROUP) * D
                merge_kv_splits(
                    outputs, sums, first, count, kv_head * GROUP, result, HEADS, GROUP, GROUP_BLOCK, D, COLUMNS_MERGED
                )
        unit += gl.num_programs(0)
        token, _, begin, end, seen_from, first, count = following


@gluon.jit
def _next(stage, STAGES: gl.constexpr):
    return gl.where(stage == STAGES - 1, 0, stage + 1)
