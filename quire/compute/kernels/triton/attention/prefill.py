"""Computes prefill attention over the paged cache, tile by tile of queries (Dao et al. 2022, 2023).

A program takes some query tokens of one row, and one KV head with all its query heads. Together they are the M rows of
its products, so that short chunks fill them too. The program reads the row's context through the block table, in tiles
of keys, and keeps a running softmax. A tile of m rows over a context of n costs 4 · m · n · d operations, half of that
where the context is the row's own, and reads 2 · n · d elements, mostly from the L2 cache. A tile's KV heads are
neighbours in the grid, so the longest tiles begin first and padding comes last.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.attention_inputs import Mask, PagedKV, PagedRows, QueryTiles, Scores
from quire.compute.kernels.triton.attention.masks import CAUSAL, mask_arguments, tile_mask, visible_range
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
from quire.compute.kernels.triton.launching.device_properties import program_memory
from quire.compute.kernels.triton.launching.launch import fast_launch

_AMPLE = 227 * 1024
"""Bytes of shared memory that a program of sm_90 may have."""


@dataclass(frozen=True)
class TileShape:
    """How the work is divided into programs.

    Attributes:
        rows: Rows of the matrix products.
        keys: Keys in a tile.
        warps: Warps of a program.
        stages: Tiles that are multiplied or on their way. Loads of block ids count as half of them.
        ahead: Additional stages where tiles' keys are split (prefill_split_kv.py): then there are few programs, and a
            multiprocessor with one program does nothing else while keys are on their way.
        at_once: Programs of a multiprocessor that take splits, within the limits of registers and shared memory.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    ahead: int = 0
    at_once: int = 1


def tile_shape(d: int, item: int, device: torch.device) -> TileShape:
    """Return the tile shape for heads of width `d` and elements of `item` bytes on this GPU."""
    return shape_within(program_memory(device), d, item)


@functools.cache
def shape_within(memory: int, d: int, item: int) -> TileShape:
    """Return the tile shape for GPUs whose programs may have `memory` bytes of shared memory.

    The shapes were measured on Hopper. For GPUs with less shared memory, they are chosen so that programs and their
    registers fit.
    """
    ample = memory >= _AMPLE
    if d > 256:  # not measured; a tile's sums take half of the registers
        if item == 4:
            return TileShape(rows=16, keys=16, warps=8, stages=1 if not ample else 2)
        return TileShape(rows=64 if ample else 16, keys=32 if ample else 16, warps=8, stages=2)
    if item == 4:
        return TileShape(rows=16, keys=32, warps=8, stages=2, at_once=2 if ample or d <= 128 else 1)
    if d > 128:
        rows, ahead = (128, 2) if ample else (64, 0)
        return TileShape(rows=rows, keys=32, warps=8, stages=3, ahead=ahead, at_once=1)
    return TileShape(rows=64, keys=64, warps=4, stages=3, ahead=2, at_once=2 if ample or d <= 64 else 1)


def queries_of_tile(d: int, item: int, group: int, device: torch.device) -> int:
    """Return how many query tokens a tile has where `group` query heads share a KV head."""
    return tile_shape(d, item, device).rows // group


def prefill_attention(
    q: Tensor, kv: PagedKV, rows: PagedRows, tiles: QueryTiles, queries: int, mask: Mask, scores: Scores, out: Tensor
) -> None:
    """Implement reference/paged_attention.py's `prefill_attention`; all tensors but the block table are contiguous.

    `queries` comes from `queries_of_tile`.
    """
    keys, values, scales = kv
    block_table, slots, starts, counts = rows
    tile_rows, tile_offsets, first_tokens = tiles
    _, block_size, kv_heads, d = keys.shape
    heads = q.shape[1]
    shape = tile_shape(d, q.element_size(), q.device)
    assert queries == shape.rows // (heads // kv_heads)
    assert all(
        map(Tensor.is_contiguous, (q, keys, values, tile_rows, tile_offsets, starts, counts, first_tokens, slots, out))
    )
    before, after = score_factors(scores)
    kind, size = mask_arguments(mask)
    overlap = can_overlap(q.device)
    _prefill_attention[(kv_heads, tile_rows.shape[0])](
        q, keys, values, block_table, tile_rows, tile_offsets, starts, counts, first_tokens, slots, out,
        scales, scores.sinks, scores.slopes, block_table.stride(0), size, before, after,
        CAPPED=scores.cap is not None, KIND=kind, HEADS=heads, KV_HEADS=kv_heads,
        GROUP=heads // kv_heads, QUERIES=queries, D=d, D_BLOCK=padded_size(d), BLOCK_SIZE=block_size, M=shape.rows,
        N=shape.keys, STAGES=shape.stages, OVERLAP=overlap, num_warps=shape.warps, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(
    do_not_specialize=["block_table_stride", "mask_size"],
    do_not_specialize_on_alignment=[
        "tile_rows",
        "tile_offsets",
        "starts",
        "counts",
        "first_tokens",
        "slots",
        "sinks",
        "slopes",
    ],
)
def _prefill_attention(
    q, keys, values, block_table, tile_rows, tile_offsets, starts, counts, first_tokens, slots, out, scales, sinks,
    slopes, block_table_stride, mask_size, before, after,
    CAPPED: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute a tile and a KV head; row m of the products is query m // GROUP, and head m % GROUP of the KV head's."""
    release_dependents(OVERLAP)
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    m, column, lane = tl.arange(0, M), tl.arange(0, D_BLOCK), tl.arange(0, N)
    wait_for_inputs(OVERLAP)
    row, offset = tl.load(tile_rows + tile), tl.load(tile_offsets + tile).to(tl.int32)
    start, count = tl.load(starts + row).to(tl.int32), tl.load(counts + row).to(tl.int32)
    first, slot = tl.load(first_tokens + row), tl.load(slots + row)
    if offset >= count:
        return
    query, head = offset + m // GROUP, kv_head * GROUP + m % GROUP
    exists = ((m // GROUP < QUERIES) & (query < count))[:, None] & (column < D)[None, :]
    where = (((first + query) * HEADS + head) * D)[:, None] + column[None, :]
    x = tl.load(q + where, exists, 0.0)
    seen_from, end = visible_range(
        start + offset, start + tl.minimum(offset + QUERIES, count), start + count, mask_size, KIND
    )
    highest, started = softmax_start(sinks, head, (m // GROUP < QUERIES) & (query < count))
    _, weights, total = attention_over_keys(
        x, highest, started, keys, values, scales, slopes, load_slopes(slopes, head, head >= 0),
        block_table + slot * block_table_stride, start + query, kv_head, column, lane, seen_from // N * N, end,
        seen_from, end, start + count, mask_size, before, after, CAPPED, KIND, KIND > CAUSAL, KV_HEADS, D, D_BLOCK,
        BLOCK_SIZE, M, N, STAGES,
    )  # fmt: skip
    tl.store(out + where, (total / weights[:, None]).to(out.dtype.element_ty), exists)


@triton.jit
def attention_over_keys(
    x, highest, weights, keys, values, scales, slopes, slope, blocks, position, kv_head, column, lane, begin, stop,
    seen_from, end, length, mask_size, before, after,
    CAPPED: tl.constexpr, KIND: tl.constexpr, MAY_SEE_NOTHING: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return the highest scores and sums of weights [M], and sums of values [M, D_BLOCK], of queries x over some keys.

    `slope` comes from `load_slopes`. The softmax goes on from `highest` and `weights` (`softmax_start`). The keys are
    those from `begin`, a multiple of N, to `stop`. Together the queries see keys from `seen_from` to `end`, of
    `length` that the row has.
    """
    first_key, end_of_keys = visible_range(position, position + 1, length, mask_size, KIND)
    if KIND > CAUSAL:
        first_key = first_key[:, None]
    total = tl.zeros((M, D_BLOCK), tl.float32)
    for at in tl.range(begin, stop, N, num_stages=STAGES):
        other = at + lane
        read = tl.minimum(other, end - 1)  # for what nobody sees, something that is seen, so that it is a number
        if KIND > CAUSAL:
            read = tl.maximum(read, seen_from)
        k, v = _load_kv_tile(keys, values, blocks, read, kv_head, column, KV_HEADS, D, D_BLOCK, BLOCK_SIZE)
        k, v = widened(k, x.dtype), widened(v, x.dtype)
        score = scaled_scores(tl.dot(x, tl.trans(k), input_precision="ieee"), before, after, CAPPED)
        score = with_slopes(score, slopes, slope, other, position[:, None])
        seen = tile_mask(other[None, :], first_key, end_of_keys[:, None], KIND)
        score = tl.where(seen, score, float("-inf"))
        highest, weights, total = online_softmax(score, v, highest, weights, total, MAY_SEE_NOTHING)
    if scales is not None:
        total *= tl.load(scales + KV_HEADS + kv_head)
    return highest, weights, total


@triton.jit
def _load_kv_tile(
    keys, values, blocks, position, kv_head, column,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Return keys and values [positions, D_BLOCK], read through the block table."""
    block = tl.load(blocks + position // BLOCK_SIZE)
    where = ((block * BLOCK_SIZE + position % BLOCK_SIZE) * (KV_HEADS * D) + kv_head * D)[:, None] + column[None, :]
    if D < D_BLOCK:
        read = (column < D)[None, :] & (position >= 0)[:, None]
        k, v = tl.load(keys + where, read, 0.0), tl.load(values + where, read, 0.0)
    else:
        k, v = tl.load(keys + where), tl.load(values + where)
    return k, v


@triton.jit
def online_softmax(score, v, highest, weights, total, MAY_SEE_NOTHING: tl.constexpr):
    """Add a tile of scores and values to the running softmax."""
    new_highest = tl.maximum(highest, tl.max(score, 1))
    basis = new_highest
    if MAY_SEE_NOTHING:
        basis = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    shrink = tl.exp2(highest - basis)
    weight = tl.exp2(score - basis[:, None])
    total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
    return new_highest, weights * shrink + tl.sum(weight, 1), total
