"""A product of few rows, and A x of the low-rank updates of its rows, in one launch.

A x takes next to nothing beside the product, but a kernel of its own in front of it is in the way: a product that comes
directly behind the kernel that makes x has its programs in place, and their first weights on the way, when x is there.
So programs of the product's own grid compute A x. They come last: the product's take multiprocessors first, and these
the room that is left.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.lora import LowRankWeights, Tiles
from quire.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.kernels.triton.launching.device_properties import multiprocessors, program_memory
from quire.kernels.triton.launching.launch import cdiv, fast_launch
from quire.kernels.triton.linear.gemm import GemmConfig, multiply_tile, scratch_of_tiles, tiles_of
from quire.kernels.triton.linear.inner_loops import gemm_loop
from quire.kernels.triton.linear.linear import config_for, linear_behind
from quire.kernels.triton.linear.tuned_linear_configs import OVERLAP
from quire.kernels.triton.lora import lora_shrink, scratch_of_splits, store_split_sum

_MOST_ROWS = 64
"""With more rows A x is not small any more."""
_MOST_TILES = 128
"""So many rows have fewer. A program reads the slots of all at once."""
_BLOCK_R = 16
_MOST_SPLITS = 8
"""Of the columns of A x: adding up more parts takes longer than they save."""
_FEWEST_STAGES = 3
_RESERVED = 1024
"""Bytes of shared memory that each program takes beside its own."""
_THREADS = 2048
"""Of a multiprocessor."""


def linear_and_shrink(
    x: Tensor, packed: Tensor, bias: Tensor | None, weights: LowRankWeights, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Arguments as in reference/lora.py: x is contiguous, and the rank is a multiple of 16."""
    config = config_for(x, packed, gate=False)
    if isinstance(config, GemmConfig) and len(x) <= _MOST_ROWS and 0 < len(tiles.rows) <= _MOST_TILES:
        device, count = x.device, tiles_of(len(x), len(packed), config)
        room = multiprocessors(device), program_memory(device)
        adapters = min(config.block_m, len(weights.ranks))
        beside = config_beside(config, *room, count, x.element_size(), _blocks(weights, adapters))
        if beside is not None:
            return gemm_and_shrink(x, packed, bias, weights, tiles, *beside, OVERLAP and can_overlap(x.device))
    low = lora_shrink(x, weights, tiles)
    return linear_behind(x, packed, bias), low


def gemm_and_shrink(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    weights: LowRankWeights,
    tiles: Tiles,
    config: GemmConfig,
    programs: int,
    overlap: bool,
) -> tuple[Tensor, Tensor]:
    """x Wᵀ + bias by `gemm` with this config, and A x by so many programs."""
    (rows, columns), outputs, (number, size) = x.shape, len(w), tiles.rows.shape
    rank, modules, splits = weights.b.shape[2], len(weights.rows), config.splits
    assert x.is_contiguous() and tiles.rows.is_contiguous() and rank % _BLOCK_R == 0 and 0 < number <= _MOST_TILES
    y, low = x.new_empty((rows, outputs)), x.new_empty((rows, modules * rank))
    product_tiles = tiles_of(rows, outputs, config)
    sums, arrived = scratch_of_tiles(y, product_tiles, splits, config.block_m * config.block_n)
    partial, arrived_low = scratch_of_splits(low, programs // 2, _MOST_SPLITS, size * _BLOCK_R)
    block_c = _columns_of_step(config)
    _tile_and_shrink_kernel[(product_tiles * splits + programs,)](
        x, w, w if bias is None else bias, y, sums, arrived,
        weights.a, weights.ranks, tiles.slots, tiles.rows, partial, arrived_low, low,
        rows, outputs, columns, product_tiles, splits, number, programs, weights.a.stride(0), weights.ranks.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT=splits > 1,
        WHOLE=columns % config.block_k == 0, SWAPPED=config.swapped, BIASED=bias is not None,
        RANK=rank, MODULES=modules, MOST_TILES=_MOST_TILES, MOST_SPLITS=_MOST_SPLITS,
        BLOCK_T=size, BLOCK_R=_BLOCK_R, BLOCK_C=block_c, WHOLE_C=columns % block_c == 0,
        OVERLAP=overlap, num_warps=config.warps, num_stages=config.stages, launch_pdl=overlap,
    )  # fmt: skip
    return y, low


@functools.cache
def config_beside(
    config: GemmConfig, count: int, memory: int, tiles: int, element: int, blocks: int
) -> tuple[GemmConfig, int] | None:
    """The config of a product that leaves room for A x, and how many programs compute that.

    They should all run from the start: dependents start only once the last of them has begun. A program with
    several blocks of A x may take longer than the product; so there should be one for each, up to one on each
    multiprocessor, or else on a quarter of them. Where the product's last wave leaves less, its programs get along with
    fewer stages, so that more of them find room.

    Args:
        config: The product's, if it were alone.
        count, memory: Multiprocessors, and what a program may have of one's shared memory, in bytes.
        tiles: Of the product.
        element: Bytes.
        blocks: Of A x, where each row has another adapter.

    Returns:
        None: there is no room.
    """
    fewest = cdiv(count, 4)
    for least in (min(count, max(blocks, fewest)), fewest):
        for stages in range(config.stages, _FEWEST_STAGES - 1, -1):
            each = stages * (config.block_m + config.block_n) * config.block_k * element
            at_once = min((memory + _RESERVED) // (each + _RESERVED), _THREADS // (32 * config.warps))
            free = -tiles * config.splits % (count * max(1, at_once))
            if free >= least:
                return replace(config, stages=stages), min(free, count)
    return None


def _blocks(weights: LowRankWeights, tiles: int) -> int:
    """Of A x, each of _BLOCK_R ranks of a module and one tile's rows."""
    return tiles * len(weights.rows) * (weights.b.shape[2] // _BLOCK_R)


def _columns_of_step(config: GemmConfig) -> int:
    """Of A x, a power of two: its rows and those of x take no more memory than those of the product."""
    most = (config.block_m + config.block_n) * config.block_k // (2 * _BLOCK_R)
    return 1 << (most.bit_length() - 1)


@fast_launch
@triton.jit(
    do_not_specialize=["rows", "tiles", "product_tiles", "splits", "programs"],
    do_not_specialize_on_alignment=["ranks", "ranks_stride", "slots", "tile_rows"],
)
def _tile_and_shrink_kernel(
    x,
    w,
    bias,
    y,
    sums,
    arrived,
    a,
    ranks,
    slots,
    tile_rows,
    partial,
    arrived_low,
    low,
    rows,
    outputs,
    columns,
    product_tiles,
    splits,
    tiles,
    programs,
    a_stride,
    ranks_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    SWAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    RANK: tl.constexpr,
    MODULES: tl.constexpr,
    MOST_TILES: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WHOLE_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A tile of the product, or of A x what falls to one of `programs`.

    Dependents start when all before this kernel has ended, not sooner: before they wait they read which rows have which
    adapter, and in front of a step's first product there are only a few small kernels between them and the one that
    writes it. For the same reason it is read here behind the wait.
    """
    program = tl.program_id(0)
    if program < product_tiles * splits:
        multiply_tile(
            program % product_tiles, program // product_tiles, splits, x, w, bias, y, sums, arrived,
            rows, outputs, columns, columns,
            BLOCK_M, BLOCK_N, BLOCK_K, SPLIT, WHOLE, SWAPPED, False, BIASED, OVERLAP, False, True,
        )  # fmt: skip
    else:
        wait_for_inputs(OVERLAP)
        release_dependents(OVERLAP)
        _shrink_tiles(
            program - product_tiles * splits, programs, x, a, ranks, slots, tile_rows, partial, arrived_low, low,
            columns, tiles, a_stride, ranks_stride,
            RANK, MODULES, MOST_TILES, MOST_SPLITS, BLOCK_T, BLOCK_R, BLOCK_C, WHOLE_C,
        )  # fmt: skip


@triton.jit
def _shrink_tiles(
    program,
    programs,
    x,
    a,
    ranks,
    slots,
    rows,
    partial,
    arrived,
    low,
    columns,
    tiles,
    a_stride,
    ranks_stride,
    RANK: tl.constexpr,
    MODULES: tl.constexpr,
    MOST_TILES: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WHOLE_C: tl.constexpr,
):
    """Each `programs`th part of A x: of the tiles that are in use, of few or of all for which there is room, each block
    of ranks is one piece of work, or is cut by its columns until every program has some."""
    GROUPS: tl.constexpr = MODULES * (RANK // BLOCK_R)
    every = tl.arange(0, MOST_TILES)
    blocks = GROUPS * tl.sum((tl.load(slots + every, every < tiles, 0) != 0).to(tl.int32), 0)  # these come first
    steps = tl.cdiv(columns, BLOCK_C)
    splits = tl.maximum(1, tl.minimum(tl.minimum(programs // tl.maximum(blocks, 1), MOST_SPLITS), steps))
    for number in range(program, blocks * splits, programs):
        block = number // splits
        split = number % splits
        tile = block // GROUPS
        group = block % GROUPS
        slot = tl.load(slots + tile)
        row = tl.load(rows + tile * BLOCK_T + tl.arange(0, BLOCK_T))
        rank = group * BLOCK_R + tl.arange(0, BLOCK_R)
        if tl.load(ranks + (slot - 1) * ranks_stride) > group * BLOCK_R % RANK:
            sums = gemm_loop(
                x, row * columns, row >= 0, a + (slot - 1) * a_stride, rank.to(tl.int64) * columns, columns,
                split * steps // splits, (split + 1) * steps // splits, BLOCK_T, BLOCK_R, BLOCK_C, WHOLE_C, False,
            )  # fmt: skip
            to = low + row[:, None] * (MODULES * RANK) + rank[None, :]
            store_split_sum(
                sums, to, (row >= 0)[:, None], partial, arrived, block, split, splits, MOST_SPLITS, BLOCK_T, BLOCK_R
            )
