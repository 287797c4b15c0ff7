"""Sums over ranks, and columns of all ranks, of larger tensors, whose time depends on bandwidth.

Each rank copies its tensor into its own window. A program tells the same program of all other ranks that its tiles are
there, waits until theirs are, and reads them. All ranks add in the order of ranks, in fp32, so all have the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.ranks.flags import release, wait_for
from quire.compute.kernels.triton.ranks.pushed import add_words, joined
from quire.compute.kernels.triton.ranks.window import (
    MAX_POLLS,
    MAX_RANKS,
    PULLED_BYTES,
    PULLED_PROGRAMS,
    PULLED_TILE_BYTES,
)

WARPS = 16


def all_reduce_pulled(x: Tensor, windows: Tensor, calls: Tensor, buffers: int, rank: int, ranks: int) -> None:
    """Replace x by its sum over all ranks.

    Args:
        x: fp32, bf16 or fp16, contiguous, of whole words of 4 bytes, PULLED_BYTES at most.
        windows: [ranks] int64, the addresses of all ranks' windows here.
        calls: [PULLED_PROGRAMS] int32, calls of each program so far.
        buffers: Where the buffers begin in a window, in bytes.
        rank, ranks: This rank, and the number of ranks.
    """
    words, tile = x.numel() * x.element_size() // 4, PULLED_TILE_BYTES // 4
    assert x.is_contiguous() and 4 * words <= PULLED_BYTES
    if not words:
        return
    overlap, tiles = can_overlap(x.device), cdiv(words, tile)
    _all_reduce_pulled[(min(tiles, PULLED_PROGRAMS),)](
        x, windows, calls, words, tiles, buffers,
        RANK=rank, RANKS=ranks, MOST=PULLED_BYTES // 4, TILE=tile,
        PROGRAMS=PULLED_PROGRAMS, LINE=MAX_RANKS, POLLS=MAX_POLLS,
        OVERLAP=overlap, num_warps=WARPS, launch_pdl=overlap,
    )  # fmt: skip


def max_gathered_rows(columns: int, element_size: int) -> int:
    """Return how many rows of so many columns go through a buffer at once."""
    return PULLED_BYTES // PULLED_TILE_BYTES // cdiv(columns * element_size, PULLED_TILE_BYTES)


def gather_columns_pulled(
    x: Tensor, out: Tensor, columns: int, windows: Tensor, calls: Tensor, buffers: int, rank: int, ranks: int
) -> None:
    """Write the ranks' columns side by side to out.

    Args:
        x: [n, at least this rank's columns], whose rows are contiguous; n is at most `max_gathered_rows`.
        out: [n, columns of all ranks], contiguous.
        columns: Columns of each rank but the last one, which may have fewer.
        windows, calls, buffers, rank, ranks: As in `all_reduce_pulled`, with whose calls these are counted.
    """
    (rows, width), tile = out.shape, PULLED_TILE_BYTES // x.element_size()
    assert x.stride(1) == 1 and out.is_contiguous() and x.dtype == out.dtype
    assert rows <= max_gathered_rows(columns, x.element_size())
    if not rows:
        return
    overlap, tiles = can_overlap(x.device), rows * cdiv(columns, tile)
    _gather_columns_pulled[(min(tiles, PULLED_PROGRAMS),)](
        x, out, windows, calls, tiles, columns, width, x.stride(0), buffers,
        RANK=rank, RANKS=ranks, MOST=PULLED_BYTES // x.element_size(), TILE=tile,
        PROGRAMS=PULLED_PROGRAMS, LINE=MAX_RANKS, POLLS=MAX_POLLS,
        OVERLAP=overlap, num_warps=WARPS, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["tiles", "buffers"])
def _all_reduce_pulled(
    x, windows, calls, words, tiles, buffers,
    RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
    LINE: tl.constexpr, POLLS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up the tiles program, program + PROGRAMS and so on, of TILE words: an fp32 each, or two 16-bit values."""
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    dtype: tl.constexpr = x.dtype.element_ty
    x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    begin = (call & 1) * MOST
    mine = _buffer_in(windows, RANK, buffers, tl.int32) + begin
    for tile in tl.range(program, tiles, PROGRAMS):
        at = tile * TILE + tl.arange(0, TILE)
        tl.store(mine + at, tl.load(x + at, at < words, 0))
    _meet(windows, program, call, RANK, RANKS, LINE, POLLS)
    for tile in tl.range(program, tiles, PROGRAMS):
        at = tile * TILE + tl.arange(0, TILE)
        low = tl.zeros((TILE,), tl.float32)
        high = tl.zeros((TILE,), tl.float32)
        for rank in tl.static_range(RANKS):
            theirs = _buffer_in(windows, rank, buffers, tl.int32) + begin
            low, high = add_words(low, high, tl.load(theirs + at, cache_modifier=".cg"), dtype)
        tl.store(x + at, joined(low, high, dtype), at < words)
    tl.store(calls + program, call)


@fast_launch
@triton.jit(do_not_specialize=["tiles", "buffers"])
def _gather_columns_pulled(
    x, out, windows, calls, tiles, columns, width, x_row, buffers,
    RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
    LINE: tl.constexpr, POLLS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Copy tiles as in `_all_reduce_pulled`, of TILE columns of one row; the last tile of a row may be shorter."""
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    begin = (call & 1) * MOST
    of_row = tl.cdiv(columns, TILE)
    own = tl.minimum(columns, width - RANK * columns)
    element = x.dtype.element_ty
    mine = _buffer_in(windows, RANK, buffers, element) + begin
    for tile in tl.range(program, tiles, PROGRAMS):
        row = (tile // of_row).to(tl.int64)
        column = tile % of_row * TILE + tl.arange(0, TILE)
        values = tl.load(x + row * x_row + column, column < own, 0.0)
        tl.store(mine + tile * TILE + tl.arange(0, TILE), values)
    _meet(windows, program, call, RANK, RANKS, LINE, POLLS)
    for tile in tl.range(program, tiles, PROGRAMS):
        row = (tile // of_row).to(tl.int64)
        column = tile % of_row * TILE + tl.arange(0, TILE)
        for rank in tl.static_range(RANKS):
            theirs = _buffer_in(windows, rank, buffers, element) + begin
            values = tl.load(theirs + tile * TILE + tl.arange(0, TILE), cache_modifier=".cg")
            inside = (column < columns) & (column < width - rank * columns)
            tl.store(out + row * width + rank * columns + column, values, inside)
    tl.store(calls + program, call)


@triton.jit
def _buffer_in(windows, rank: tl.constexpr, buffers, element: tl.constexpr):
    """Return the address of the first of a rank's two buffers."""
    return tl.multiple_of((tl.load(windows + rank) + buffers).to(tl.pointer_type(element)), 16)


@triton.jit
def _meet(windows, program, call, RANK: tl.constexpr, RANKS: tl.constexpr, LINE: tl.constexpr, POLLS: tl.constexpr):
    """Show the other ranks what this program has written, and wait until their programs of this number come here."""
    tl.debug_barrier()  # all threads have written
    flag = program * LINE
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            release(tl.load(windows + rank) + (flag + RANK) * 4, call)
    mine = tl.load(windows + RANK)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            wait_for(mine + (flag + rank) * 4, call, POLLS)
    tl.debug_barrier()
