"""Computes a product of few rows, and A x of the low-rank updates of its rows, in one launch.

A x takes little time beside the product, but a kernel of its own would be in the way: a product that directly follows
the kernel that makes x has its programs in place, and their first weights on the way, when x is complete. So programs
of the product's own grid compute A x. The product's programs come first and are divided among multiprocessors as if
they were alone. Behind them come as many programs as there is room for, which only compute A x. The product's programs
compute, after their tiles, whatever would take those programs longer than a tile.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.lora import LowRankWeights, Tiles
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.device_properties import multiprocessors, program_memory
from quire.compute.kernels.triton.launching.launch import fast_launch
from quire.compute.kernels.triton.linear.gemm import (
    GemmConfig,
    multiply_tile,
    place_of_tile,
    scratch_of_tiles,
    tiles_of,
)
from quire.compute.kernels.triton.linear.inner_loops import fetch_ahead
from quire.compute.kernels.triton.linear.linear import config_for, linear
from quire.compute.kernels.triton.lora import lora_shrink, scratch_of_splits, store_split_sum

_MAX_ROWS = 64
"""The maximum number of rows; with more, A x takes more time."""
_MAX_TILES = 128
"""The maximum number of tiles whose slots a program reads at once; _MAX_ROWS rows have fewer."""
_BLOCK_R = 16
_MAX_SPLITS = 8
"""The maximum number of parts of the columns of A x; adding up more takes longer than they save."""
_RESERVED = 1024
"""Bytes of shared memory that each program takes in addition."""
_THREADS = 2048
"""Threads of a multiprocessor."""


def linear_and_shrink(
    x: Tensor, packed: Tensor, bias: Tensor | None, weights: LowRankWeights, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Implement reference/lora.py's `linear_and_shrink`; x is contiguous, and the rank is a multiple of 16."""
    config = config_for(x, packed, gate=False)
    if isinstance(config, GemmConfig) and len(x) <= _MAX_ROWS and 0 < len(tiles.rows) <= _MAX_TILES:
        device, count = x.device, tiles_of(len(x), len(packed), config)
        programs = room_beside(config, multiprocessors(device), program_memory(device), count, x.element_size())
        return gemm_and_shrink(x, packed, bias, weights, tiles, config, programs, can_overlap(device))
    low = lora_shrink(x, weights, tiles)
    return linear(x, packed, bias, waits_late=True), low


def gemm_and_shrink(
    x: Tensor, w: Tensor, bias: Tensor | None, weights: LowRankWeights, tiles: Tiles, config: GemmConfig, programs: int,
    overlap: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute x Wᵀ + bias by `gemm` with this config, and A x by `programs` beside it, which may be 0."""
    (rows, columns), outputs, (number, size) = x.shape, len(w), tiles.rows.shape
    rank, modules, splits = weights.b.shape[2], len(weights.rows), config.splits
    assert x.is_contiguous() and tiles.rows.is_contiguous() and rank % _BLOCK_R == 0 and 0 < number <= _MAX_TILES
    y, low = x.new_empty((rows, outputs)), x.new_empty((rows, modules * rank))
    product_tiles = tiles_of(rows, outputs, config)
    sums, arrived = scratch_of_tiles(y, product_tiles, splits, config.block_m * config.block_n)
    shared = product_tiles * splits
    # Blocks are cut by programs beside the product, where these are enough for all, or else by the product's.
    partial, arrived_low = scratch_of_splits(low, max(shared, programs) // 2, _MAX_SPLITS, size * _BLOCK_R)
    most = max(1, config.block_n // (splits * 2 * _BLOCK_R))  # half as much of A as a product's program has of W
    block_c = _columns_of_step(config)
    _tile_and_shrink_kernel[(shared + programs,)](
        x, w, w if bias is None else bias, y, sums, arrived,
        weights.a, weights.ranks, tiles.slots, tiles.rows, partial, arrived_low, low,
        rows, outputs, columns, product_tiles, splits, number, programs, most, weights.a.stride(0),
        weights.ranks.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT=splits > 1,
        WHOLE=columns % config.block_k == 0, SWAPPED=config.swapped, BIASED=bias is not None,
        RANK=rank, MODULES=modules, MAX_TILES=_MAX_TILES, MAX_SPLITS=_MAX_SPLITS,
        BLOCK_T=size, BLOCK_R=_BLOCK_R, BLOCK_C=block_c, PARTS=min(config.warps, block_c // _BLOCK_R),
        WHOLE_C=columns % block_c == 0,
        OVERLAP=overlap, num_warps=config.warps, num_stages=config.stages, launch_pdl=overlap,
    )  # fmt: skip
    return y, low


@functools.cache
def room_beside(config: GemmConfig, count: int, memory: int, tiles: int, element: int) -> int:
    """Return how many programs fit beside a product's last wave, at most one on each multiprocessor.

    The programs run from the start, because dependents start only once the last program has begun.

    Args:
        config: The product's config.
        count, memory: The number of multiprocessors, and the bytes of shared memory that a program may have.
        tiles: The number of the product's tiles.
        element: Bytes of an element.
    """
    each = config.stages * (config.block_m + config.block_n) * config.block_k * element
    at_once = min((memory + _RESERVED) // (each + _RESERVED), _THREADS // (32 * config.warps))
    return min(-tiles * config.splits % (count * max(1, at_once)), count)


def _columns_of_step(config: GemmConfig) -> int:
    """Return the columns of a step of A x, a power of two, which takes no more memory than a step of the product."""
    most = (config.block_m + config.block_n) * config.block_k // (2 * _BLOCK_R)
    return 1 << (most.bit_length() - 1)


@fast_launch
@triton.jit(
    do_not_specialize=["rows", "tiles", "product_tiles", "splits", "programs", "most"],
    do_not_specialize_on_alignment=["ranks", "ranks_stride", "slots", "tile_rows"],
)
def _tile_and_shrink_kernel(
    x, w, bias, y, sums, arrived, a, ranks, slots, tile_rows, partial, arrived_low, low, rows, outputs, columns,
    product_tiles, splits, tiles, programs, most, a_stride, ranks_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
    SWAPPED: tl.constexpr, BIASED: tl.constexpr, RANK: tl.constexpr, MODULES: tl.constexpr, MAX_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
    WHOLE_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the product, or none, and this program's part of A x.

    Dependents start when all kernels before this one have ended, because they read which rows have which adapter before
    they wait, and a step's first product comes only a few small kernels after the one that writes this. For the same
    reason, this kernel reads it after its own wait.
    """
    program = tl.program_id(0)
    shared = product_tiles * splits
    tile = program % product_tiles
    split = program // product_tiles
    begin, m, w_rows, first, last = place_of_tile(
        tile, split, splits, rows, outputs, columns, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT, False
    )
    if OVERLAP and program < shared:
        fetch_ahead(w, w_rows * columns, first * BLOCK_K, columns, BLOCK_N, 2 * BLOCK_K)
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    every = tl.arange(0, MAX_TILES)
    used = tl.load(slots + every, every < tiles, 0)  # those that are in use come first
    taken = programs * most // (MODULES * (RANK // BLOCK_R))  # tiles, by programs beside the product
    slot_behind = tl.load(slots + taken, taken < tiles, 0)
    if program < shared:
        multiply_tile(
            tile, split, splits, begin, m, w_rows, first, last, x, w, bias, y, sums, arrived,
            rows, outputs, columns, columns,
            BLOCK_M, BLOCK_N, BLOCK_K, SPLIT, WHOLE, SWAPPED, False, BIASED, OVERLAP, False,
        )  # fmt: skip
        if slot_behind == 0:
            return
    blocks = MODULES * (RANK // BLOCK_R) * tl.sum((used != 0).to(tl.int32), 0)
    beside = tl.minimum(blocks, programs * most)
    begin_block, end_block, number, workers = 0, beside, program - shared, programs
    if program < shared:
        begin_block, end_block, number, workers = beside, blocks, program, shared
    _shrink_blocks(
        begin_block, end_block, number, workers, x, a, ranks, slots, tile_rows, partial, arrived_low, low,
        columns, a_stride, ranks_stride,
        RANK, MODULES, MAX_SPLITS, BLOCK_T, BLOCK_R, BLOCK_C, PARTS, WHOLE_C,
    )  # fmt: skip


@triton.jit
def _shrink_blocks(
    begin_block, end_block, number, workers, x, a, ranks, slots, rows, partial, arrived, low, columns, a_stride,
    ranks_stride,
    RANK: tl.constexpr, MODULES: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, PARTS: tl.constexpr, WHOLE_C: tl.constexpr,
):  # fmt: skip
    """Compute the part of worker `number` of some blocks of A x, each of BLOCK_R ranks for a tile's rows.

    Blocks are cut by the columns until every worker has a part.
    """
    GROUPS: tl.constexpr = MODULES * (RANK // BLOCK_R)
    steps = tl.cdiv(columns, BLOCK_C)
    blocks = end_block - begin_block
    splits = tl.maximum(1, tl.minimum(tl.minimum(workers // tl.maximum(blocks, 1), MAX_SPLITS), steps))
    for piece in range(number, blocks * splits, workers):
        block = piece // splits
        split = piece % splits
        tile = (begin_block + block) // GROUPS
        group = (begin_block + block) % GROUPS
        slot = tl.load(slots + tile)
        row = tl.load(rows + tile * BLOCK_T + tl.arange(0, BLOCK_T))
        rank = group * BLOCK_R + tl.arange(0, BLOCK_R)
        if tl.load(ranks + (slot - 1) * ranks_stride) > group * BLOCK_R % RANK:
            sums = _shrink_loop(
                x, row * columns, row >= 0, a + (slot - 1) * a_stride, rank.to(tl.int64) * columns, columns,
                split * steps // splits, (split + 1) * steps // splits, BLOCK_T, BLOCK_R, BLOCK_C, PARTS,
                WHOLE_C,
            )  # fmt: skip
            to = low + row[:, None] * (MODULES * RANK) + rank[None, :]
            store_split_sum(
                sums, to, (row >= 0)[:, None], partial, arrived, block, split, splits, MAX_SPLITS, BLOCK_T, BLOCK_R
            )


@triton.jit
def _shrink_loop(
    x, x_rows, x_mask, a, a_rows, columns, first, last,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute `gemm_loop` of a small tile [BLOCK_T, BLOCK_R] fp32, with a step's columns in PARTS, one for each warp.

    Warps can share nothing else of such a small tile; without the parts, its products would wait for each other.
    """
    EACH: tl.constexpr = BLOCK_C // PARTS
    column = tl.arange(0, PARTS)[:, None, None] * EACH + tl.arange(0, EACH)[None, None, :]
    x_pointers = x + x_rows[None, :, None] + column + first * BLOCK_C
    a_pointers = a + a_rows[None, :, None] + column + first * BLOCK_C
    sums = tl.zeros((PARTS, BLOCK_T, BLOCK_R), tl.float32)
    for step in range(first, last):
        inside = x_mask[None, :, None]
        if WHOLE:
            own = tl.load(x_pointers, inside, 0.0)
            weight = tl.load(a_pointers, eviction_policy="evict_first")
        else:
            there = step * BLOCK_C + column < columns
            own = tl.load(x_pointers, inside & there, 0.0)
            weight = tl.load(a_pointers, there, 0.0, eviction_policy="evict_first")
        sums = tl.dot(own, tl.permute(weight, (0, 2, 1)), sums, input_precision="ieee")
        x_pointers += BLOCK_C
        a_pointers += BLOCK_C
    return tl.sum(sums, 0)
