"""y = x Wᵀ for few rows of x, on the tensor cores, by as many programs as the card runs at the same time.

All tiles of W, one after another, are one line of steps of BLOCK_K columns, and each program takes an equal part of the
line (the stream-k of Osama et al. 2023): no multiprocessor reads more of W than another, however many tiles there are,
and 2 · outputs · columns bytes are read once. Where a part begins or ends within a tile, its sums go to memory, and the
program that finds itself the last one of a tile adds all of the tile's in the order of the columns, not of arrival, so
that the result is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.kernels.triton.launching.launch import launched
from quire.kernels.triton.linear.outputs import arrivals, tile_at, tiles_of, write_tile
from quire.kernels.triton.linear.products import fetch_ahead, tile_product


@dataclass(frozen=True)
class Streams:
    """How the work is cut.

    Attributes:
        block_m, block_n, block_k: Rows of x, rows of W (gates and ups together where the product is gated) and
            columns of a step's tile.
        programs: That share the work.
        warps: Of 32 threads, by program.
        stages: Steps under way at the same time.
        ahead: Columns of its first tile that a program fetches while the kernel before still ends.
        swapped: W is the tensor core's first operand.
    """

    block_m: int
    block_n: int
    block_k: int
    programs: int
    warps: int
    stages: int
    ahead: int
    swapped: bool


def stream_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, cut: Streams, gate: bool, overlap: bool
) -> None:
    """y = x Wᵀ + bias, or silu of its first half times the second where `gate`: x [rows, columns], y [rows, outputs].

    The rows of x may lie apart; y is contiguous.
    """
    rows, outputs = y.shape
    columns = w.shape[1]
    tiles = tiles_of(y, cut.block_m, cut.block_n, gate)
    programs = min(cut.programs, tiles * -(-columns // cut.block_k))
    _stream_kernel[(programs,)](
        x,
        w,
        w if bias is None else bias,
        y,
        torch.empty((programs, 2, cut.block_m * cut.block_n), dtype=torch.float32, device=x.device),
        arrivals(tiles, x.device),
        rows,
        outputs,
        columns,
        x.stride(0),
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        AHEAD=cut.ahead,
        WHOLE=columns % cut.block_k == 0,
        SWAPPED=cut.swapped,
        GATED=gate,
        BIASED=bias is not None,
        OVERLAP=overlap,
        num_warps=cut.warps,
        num_stages=cut.stages,
        launch_pdl=overlap,
    )


@launched
@triton.jit(do_not_specialize=["rows"])
def _stream_kernel(
    x,
    w,
    bias,
    y,
    sums,
    arrived,
    rows,
    outputs,
    columns,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    WHOLE: tl.constexpr,
    SWAPPED: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release_dependents(OVERLAP)
    MADE: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    down = tl.cdiv(rows, BLOCK_M)
    steps = tl.cdiv(columns, BLOCK_K)
    total = tl.cdiv(outputs, MADE) * down * steps
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    step = program * total // programs
    end = (program + 1) * total // programs
    if OVERLAP:
        _, _, w_rows = tile_at(step // steps, down, outputs, BLOCK_M, BLOCK_N, GATED)
        fetch_ahead(w, w_rows * columns, step % steps * BLOCK_K, columns, BLOCK_N, AHEAD)
        wait_for_inputs(OVERLAP)
    while step < end:
        tile = step // steps
        first = step % steps
        last = tl.minimum(steps, first + end - step)
        begin, m, w_rows = tile_at(tile, down, outputs, BLOCK_M, BLOCK_N, GATED)
        values = tile_product(
            x,
            m.to(tl.int64) * x_stride,
            m < rows,
            w,
            w_rows * columns,
            columns,
            first,
            last,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            WHOLE,
            SWAPPED,
        )
        complete = last - first == steps
        if not complete:
            # A program leaves at most two parts: one of a tile that another began, one of a tile that it begins itself.
            starter = ((tile * steps + 1) * programs - 1) // total
            ender = ((tile + 1) * steps * programs - 1) // total
            place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(sums + (2 * program + (program == starter).to(tl.int32)) * SIZE + place, values)
            tl.debug_barrier()  # every thread's share is written before one of them says so
            complete = tl.atomic_add(arrived + tile, 1) == ender - starter
            if complete:
                tl.store(arrived + tile, 0)
                values = tl.load(sums + (2 * starter + 1) * SIZE + place, cache_modifier=".cg")
                for other in range(starter + 1, ender + 1):
                    values += tl.load(sums + 2 * other * SIZE + place, cache_modifier=".cg")
        if complete:
            write_tile(values, bias, y, m, w_rows, begin, rows, outputs, BLOCK_M, BLOCK_N, GATED, BIASED)
        step += last - first
