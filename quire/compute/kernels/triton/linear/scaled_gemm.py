"""y = x Wᵀ of 8-bit codes with scales, on the tensor cores; see gemm.py for how tiles and splits share the work.

It reads outputs · columns bytes of the weight, half of what bf16 takes. Scales of rows and outputs multiply the sums at
the end; those of blocks multiply the sums of their columns, one block a step, which also keeps sums in fp32 where the
tensor cores add fewer bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.scaled_linear import ScaledWeight
from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch
from quire.compute.kernels.triton.linear.gemm import GemmConfig, place_of_tile, scratch_of_tiles, tiles_of
from quire.compute.kernels.triton.linear.inner_loops import fetch_ahead, gated, gemm_loop

BLOCK_COLUMNS = 128
"""The number of neighbouring columns that share a scale, in weights whose scales are of blocks."""


def scaled_gemm(
    x: tuple[Tensor, Tensor],
    weight: ScaledWeight,
    bias: Tensor | None,
    y: Tensor,
    config: GemmConfig,
    gate: bool,
    overlap: bool,
) -> None:
    """y = x Wᵀ + bias, or silu of its first half times the second where `gate`.

    Args:
        x: [rows, columns] codes and [rows, groups] scales, as quantize_rows makes them.
        y: [rows, outputs], contiguous.
        config: Its block_k is that of a block, where W has blocks.
    """
    codes, scales = x
    rows, outputs = y.shape
    columns = weight.codes.shape[1]
    blocked = weight.scales.shape[1] > 1
    assert not blocked or config.block_k == weight.block[1]
    tiles = tiles_of(rows, outputs, config, gate)
    sums, arrived = scratch_of_tiles(y, tiles, config.splits, config.block_m * config.block_n)
    _scaled_tile_kernel[(tiles, config.splits)](
        codes, scales, weight.codes, weight.scales, weight.codes if bias is None else bias, y, sums, arrived, rows,
        outputs, columns, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SCALE_ROWS=weight.block[0], GROUPS=weight.scales.shape[1], SPLIT=config.splits > 1,
        WHOLE=columns % config.block_k == 0, SWAPPED=config.swapped, GATED=gate, BIASED=bias is not None,
        OVERLAP=overlap, num_warps=config.warps, num_stages=config.stages, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _scaled_tile_kernel(
    x, x_scales, w, w_scales, bias, y, sums, arrived, rows, outputs, columns, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE: tl.constexpr, SWAPPED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    tile = tl.program_id(0)
    split = 0
    splits = 1
    if SPLIT:
        split = tl.program_id(1)
        splits = tl.num_programs(1)
    begin, m, w_rows, first, last = place_of_tile(
        tile, split, splits, rows, outputs, columns, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT, GATED
    )
    if OVERLAP:
        fetch_ahead(w, w_rows * columns, first * BLOCK_K, columns, BLOCK_N, 2 * BLOCK_K)
        wait_for_inputs(OVERLAP)
    row = m.to(tl.int64)
    GROUP: tl.constexpr = BLOCK_K if GROUPS > 1 else 0
    values = gemm_loop(
        x, row * columns, m < rows, w, w_rows * columns, columns, first, last,
        BLOCK_M, BLOCK_N, BLOCK_K, WHOLE, SWAPPED,
        x_scales + row * GROUPS, w_scales + w_rows // SCALE_ROWS * GROUPS, GROUP, GROUP,
    )  # fmt: skip
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
            _write_scaled(
                values, x_scales, w_scales, bias, y, m, w_rows, begin, rows, outputs,
                BLOCK_M, BLOCK_N, GROUPS, GATED, BIASED,
            )  # fmt: skip
    else:
        _write_scaled(
            values, x_scales, w_scales, bias, y, m, w_rows, begin, rows, outputs,
            BLOCK_M, BLOCK_N, GROUPS, GATED, BIASED,
        )  # fmt: skip


@triton.jit
def _write_scaled(
    sums, x_scales, w_scales, bias, y, m, w_rows, begin, rows, outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """What sums [BLOCK_M, BLOCK_N] make of y [rows, outputs]."""
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
