"""Computes y = x Wᵀ on the tensor cores, for few rows of x, or for any number with 8-bit codes and scales.

A program multiplies a tile of x with a tile of W over a part of the columns. Tiles of x that share one of W run side by
side, so W is read from memory once, while x comes from the cache. Where there are too few tiles to keep the whole GPU
reading, the columns are cut into splits. Each split leaves its sums in memory, and the last program of a tile to end
adds them in the order of the splits, not of their arrival, so that the result is always the same.

Scales of rows and outputs multiply the sums at the end. Scales of blocks multiply the sums of their columns, one block
a step, which also keeps sums in fp32, as the tensor cores add fewer bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.linear.inner_loops import fetch_ahead, gated, gemm_loop, weight_rows

BLOCK_COLUMNS = 128
"""The number of neighbouring columns that share a scale, in weights whose scales are of blocks."""
_MAX_TILES = 65_536
"""The maximum number of tiles in a product whose tiles have several programs."""


@dataclass(frozen=True)
class GemmConfig:
    """How the work is divided into programs.

    Attributes:
        block_m, block_n, block_k: Rows of x, rows of W (gates and ups together where the product is gated) and
            columns of a tile.
        splits: Parts of the columns.
        warps: Warps of a program.
        stages: Tiles under way at the same time.
        swapped: W is the tensor core's first operand.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    swapped: bool


def gemm(
    x: Tensor | tuple[Tensor, Tensor], w: Tensor | ScaledWeight, bias: Tensor | None, y: Tensor, config: GemmConfig,
    gate: bool, overlap: bool, *, waits_late: bool = False,
) -> None:  # fmt: skip
    """Write x Wᵀ + bias to y, or silu of its first half times the second if `gate`.

    Args:
        x: [rows, columns], whose rows may lie apart; for a weight of codes, codes [rows, columns] and scales [rows,
            groups], as quantize_rows makes them.
        y: [rows, outputs], contiguous.
        config: With scales of blocks, its block_k is the columns of a block.
        waits_late: Wait for the kernel that was launched last only before the sums are written. That kernel releases
            its dependents after it has waited for x.
    """
    values, scales = (x, None) if isinstance(x, Tensor) else x
    weight, w_scales, block = (w, None, (1, 0)) if isinstance(w, Tensor) else w
    groups = 0 if w_scales is None else w_scales.shape[1]
    assert groups < 2 or config.block_k == block[1]
    (rows, outputs), columns = y.shape, weight.shape[1]
    tiles = tiles_of(rows, outputs, config, gate)
    sums, arrived = scratch_of_tiles(y, tiles, config.splits, config.block_m * config.block_n)
    _tile_kernel[(tiles, config.splits)](
        values, scales, weight, w_scales, weight if bias is None else bias, y, sums, arrived, rows, outputs, columns,
        values.stride(0), BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SCALE_ROWS=block[0],
        GROUPS=groups, SPLIT=config.splits > 1, WHOLE=columns % config.block_k == 0, SWAPPED=config.swapped,
        GATED=gate, BIASED=bias is not None, OVERLAP=overlap, WAITS_LATE=waits_late, num_warps=config.warps,
        num_stages=config.stages, launch_pdl=overlap,
    )  # fmt: skip


def tiles_of(rows: int, outputs: int, config: GemmConfig, gate: bool = False) -> int:
    return cdiv(outputs, config.block_n // 2 if gate else config.block_n) * cdiv(rows, config.block_m)


def scratch_of_tiles(y: Tensor, tiles: int, splits: int, size: int) -> tuple[Tensor, Tensor]:
    """Return memory for the splits of a product y whose tiles have `size` sums.

    The memory is sums [tiles, splits, size] fp32, and how many programs of each tile have ended. Neither is used where
    a tile has one program.
    """
    if splits == 1:
        return y, y
    assert tiles <= _MAX_TILES
    return torch.empty((tiles, splits, size), dtype=torch.float32, device=y.device), _counters(y.device)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Return [_MAX_TILES] int32 zeros.

    The last program of a tile sets its counter to 0 again, and products of a device run one after another, on one
    stream.
    """
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _tile_kernel(
    x, x_scales, w, w_scales, bias, y, sums, arrived, rows, outputs, columns, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUPS: tl.constexpr,
    SPLIT: tl.constexpr, WHOLE: tl.constexpr, SWAPPED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    OVERLAP: tl.constexpr, WAITS_LATE: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    split = 0
    splits = 1
    if SPLIT:
        split = tl.program_id(1)
        splits = tl.num_programs(1)
    begin, m, w_rows, first, last = place_of_tile(
        tl.program_id(0), split, splits, rows, outputs, columns, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT, GATED
    )
    if OVERLAP:
        fetch_ahead(w, w_rows * columns, first * BLOCK_K, columns, BLOCK_N, 2 * BLOCK_K)
        if not WAITS_LATE:
            wait_for_inputs(OVERLAP)
    multiply_tile(
        tl.program_id(0), split, splits, begin, m, w_rows, first, last, x, w, bias, y, sums, arrived,
        rows, outputs, columns, x_stride,
        BLOCK_M, BLOCK_N, BLOCK_K, SPLIT, WHOLE, SWAPPED, GATED, BIASED, OVERLAP, WAITS_LATE,
        x_scales, w_scales, SCALE_ROWS, GROUPS,
    )  # fmt: skip


@triton.jit
def place_of_tile(
    tile, split, splits, rows, outputs, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return a tile's first output, rows of x [BLOCK_M] and rows of the weight [BLOCK_N], and a split's first and end
    step.

    A step has BLOCK_K columns.
    """
    begin, m, w_rows = tile_at(tile, tl.cdiv(rows, BLOCK_M), outputs, BLOCK_M, BLOCK_N, GATED)
    steps = tl.cdiv(columns, BLOCK_K)
    first = 0
    last = steps
    if SPLIT:
        first = split * steps // splits
        last = (split + 1) * steps // splits
    return begin, m, w_rows, first, last


@triton.jit
def multiply_tile(
    tile, split, splits, begin, m, w_rows, first, last, x, w, bias, y, sums, arrived, rows, outputs, columns, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
    SWAPPED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, OVERLAP: tl.constexpr, WAITS_LATE: tl.constexpr,
    x_scales=None, w_scales=None, SCALE_ROWS: tl.constexpr = 1, GROUPS: tl.constexpr = 0,
):  # fmt: skip
    """Compute a tile of the product at its place, over one of `splits` parts of the columns.

    The caller has waited for x; if WAITS_LATE, x was complete without waiting. Weights of codes have GROUPS scales a
    row, which SCALE_ROWS rows share.
    """
    row = m.to(tl.int64)
    if GROUPS > 0:
        GROUP: tl.constexpr = BLOCK_K if GROUPS > 1 else 0
        values = gemm_loop(
            x, row * x_stride, m < rows, w, w_rows * columns, columns, first, last,
            BLOCK_M, BLOCK_N, BLOCK_K, WHOLE, SWAPPED,
            x_scales + row * GROUPS, w_scales + w_rows // SCALE_ROWS * GROUPS, GROUP, GROUP,
        )  # fmt: skip
    else:
        values = gemm_loop(
            x, row * x_stride, m < rows, w, w_rows * columns, columns, first, last,
            BLOCK_M, BLOCK_N, BLOCK_K, WHOLE, SWAPPED,
        )  # fmt: skip
    if WAITS_LATE:
        wait_for_inputs(OVERLAP)
    if SPLIT:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        own = sums + tile.to(tl.int64) * splits * SIZE
        tl.store(own + split * SIZE + place, values)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(arrived + tile, 1) == splits - 1:
            tl.store(arrived + tile, 0)
            values = tl.load(own + place, cache_modifier=".cg")
            for other in range(1, splits):
                values += tl.load(own + other * SIZE + place, cache_modifier=".cg")
            write_tile(
                values, bias, y, m, w_rows, begin, rows, outputs, BLOCK_M, BLOCK_N, GATED, BIASED,
                x_scales, w_scales, GROUPS,
            )  # fmt: skip
    else:
        write_tile(
            values, bias, y, m, w_rows, begin, rows, outputs, BLOCK_M, BLOCK_N, GATED, BIASED,
            x_scales, w_scales, GROUPS,
        )  # fmt: skip


@triton.jit
def tile_at(tile, down, outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return a tile's first output, its rows of x [BLOCK_M] and its rows of the weight [BLOCK_N].

    The `down` tiles with the same rows of the weight have neighbouring numbers.
    """
    begin = tile // down * (BLOCK_N // 2 if GATED else BLOCK_N)
    m = tile % down * BLOCK_M + tl.arange(0, BLOCK_M)
    return begin, m, weight_rows(begin, outputs, BLOCK_N, GATED)


@triton.jit
def write_tile(
    sums, bias, y, m, w_rows, begin, rows, outputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    x_scales=None, w_scales=None, GROUPS: tl.constexpr = 0,
):  # fmt: skip
    """Write a tile of y [rows, outputs] from its sums [BLOCK_M, BLOCK_N]."""
    MADE: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if GROUPS == 1:
        sums *= tl.load(x_scales + m, m < rows, 0.0)[:, None] * tl.load(w_scales + w_rows)[None, :]
    if BIASED:
        sums += tl.load(bias + w_rows).to(tl.float32)[None, :]
    if GATED:
        sums = gated(sums, BLOCK_M, MADE)
    n = begin + tl.arange(0, MADE)
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * outputs + n[None, :], sums.to(y.dtype.element_ty), inside)
