"""Computes low-rank updates of rows in tiles whose rows share one adapter and each read of its weights.

Both kernels move little data and wait for memory, so their time depends on how many reads follow one another, and on
how many of them other kernels hide. A x is computed while the product that is updated runs, whose result only B A x
needs; `lora_linear.py` computes both in one launch. Several programs share a row, and the last of them adds up all
parts in the order of the columns. B's weights are read while the product ends.

Once the product is complete, a program requests everything it reads before it uses any of it: Triton makes threads
exchange data as soon as it is widened or multiplied, and requests no later read before that is done.

Launches have room for the most tiles that a step of this size can have, so that CUDA graphs can capture them; a program
whose tile is empty ends at once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.lora import LowRankWeights, Tiles, lies_beside
from quire.compute.kernels.triton.activation import gated_silu
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2
from quire.compute.kernels.triton.linear.inner_loops import fetch_ahead

_BLOCK_K, _BLOCK_N, _BLOCK_R = 256, 128, 16
WIDEST_RANK = 64
"""The maximum number of ranks that one program computes."""
_FEW, _SOME = 64, 512
"""The maximum numbers of rows for which columns are split among programs finely, and at all."""
_MAX_SPLITS = 16
_WARPS = 4
_EXPAND_STAGES = 1
"""The loop over further ranks is not pipelined: a pipeline's start would run, with barriers, even without further
ranks."""
_PROGRAMS = 512
"""How many programs of this size a GPU runs at once: about four on each multiprocessor."""
_MAX_BLOCKS = 65_536
"""The maximum number of blocks (a tile's rows, some ranks of one module) whose columns several programs may share."""


def lora_shrink(x: Tensor, weights: LowRankWeights, tiles: Tiles) -> Tensor:
    """Implement reference/lora.py's `lora_shrink`; x is contiguous, and the rank is a multiple of 16.

    Returns:
        [n, modules · rank], A x of rows with adapters; other rows are undefined.
    """
    assert x.is_contiguous() and tiles.rows.is_contiguous()
    (number, size), columns = tiles.rows.shape, x.shape[1]
    rank, modules, overlap = weights.b.shape[2], len(weights.rows), can_overlap(x.device)
    block_rank = min(rank & -rank, WIDEST_RANK)
    blocks, splits = number * modules * (rank // block_rank), _splits(len(x), columns)
    low = x.new_empty((len(x), modules * rank))
    if not number:
        return low
    partial, arrived = scratch_of_splits(low, blocks, splits, size * block_rank)
    _shrink[(blocks * splits,)](
        x, weights.a, weights.ranks, tiles.slots, tiles.rows, partial, arrived, low,
        weights.a.stride(0), weights.ranks.stride(0),
        COLUMNS=columns, RANK=rank, MODULES=modules, SPLITS=splits, SPLITS_UP=next_power_of_2(splits),
        BLOCK_M=size, BLOCK_R=block_rank, BLOCK_K=_BLOCK_K, IEEE=x.dtype == torch.float32, OVERLAP=overlap,
        num_warps=_WARPS, launch_pdl=overlap,
    )  # fmt: skip
    return low


def lora_expand(low: Tensor, weights: LowRankWeights, tiles: Tiles, y: Tensor) -> None:
    """Implement reference/lora.py's `lora_expand`; y is contiguous, and there are up to three modules.

    `lora_shrink` was launched before the product that made y, with only kernels between them that wait for their
    inputs, or one launch made both. So when this kernel starts, all kernels before A x have ended, and it may read what
    they wrote, for example `tiles`, before it waits.
    """
    assert y.is_contiguous() and len(weights.rows) <= 3
    rows, blocks = (*weights.rows, 0, 0), sum(cdiv(each, _BLOCK_N) for each in weights.rows)
    _launch_expand(_expand, low, weights, tiles, (y,), blocks, ROWS_0=rows[0], ROWS_1=rows[1], ROWS_2=rows[2])


def lora_expand_silu_and_mul(low: Tensor, weights: LowRankWeights, tiles: Tiles, y: Tensor, out: Tensor) -> None:
    """Implement reference/lora.py's `lora_expand_silu_and_mul`; arguments as in this module's `lora_expand`.

    y is not changed.
    """
    assert y.is_contiguous() and out.is_contiguous() and len(weights.rows) <= 2
    width = out.shape[1]
    _launch_expand(_expand_silu_and_mul, low, weights, tiles, (y, out), cdiv(width, _BLOCK_N), WIDTH=width)


def _launch_expand(
    kernel: Any, low: Tensor, weights: LowRankWeights, tiles: Tiles, outputs: tuple[Tensor, ...], blocks: int,
    **constants: int,
) -> None:  # fmt: skip
    """Launch one of the two expand kernels with this many blocks of outputs for each tile."""
    (number, size), y = tiles.rows.shape, outputs[0]
    if not number:
        return
    step, overlap = _tiles_at_once(len(y), number, blocks), can_overlap(y.device)
    factors, summands, scaled = scaling_of(weights)
    kernel[(step * blocks,)](
        low, weights.b, weights.ranks, factors, summands, scaled, tiles.slots, tiles.rows, *outputs, number, step,
        weights.b.stride(0), weights.ranks.stride(0),
        **constants, RANK=weights.b.shape[2], MODULES=len(weights.rows), BLOCK_M=size, BLOCK_R=_BLOCK_R,
        BLOCK_N=_BLOCK_N, IEEE=y.dtype == torch.float32, SCALED=weights.scaling is not None, OVERLAP=overlap,
        num_warps=_WARPS, num_stages=_EXPAND_STAGES, launch_pdl=overlap,
    )  # fmt: skip


def scaling_of(weights: LowRankWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return factors, summands, and which adapters have them; if none has, tensors that are not read."""
    assert weights.scaling is None or lies_beside(weights.scaling, weights)
    return weights.scaling or (weights.b, weights.b, weights.ranks)


def _tiles_at_once(rows: int, tiles: int, blocks: int) -> int:
    """Return how many tiles have programs of their own.

    A few rows use few of many tiles, so then programs that all run at once take one tile after another.
    """
    return tiles if rows > _FEW else max(1, min(tiles, _PROGRAMS // blocks))


def scratch_of_splits(low: Tensor, blocks: int, splits: int, size: int) -> tuple[Tensor, Tensor]:
    """Return memory for `store_split_sum` of `blocks` with `size` sums each; it is not used with one program for each
    block."""
    if splits == 1:
        return low, low
    assert blocks <= _MAX_BLOCKS
    return torch.empty((blocks, splits, size), dtype=torch.float32, device=low.device), _counters(low.device)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Return [_MAX_BLOCKS] int32 zeros, which count a block's programs; the last program sets its counter to 0
    again."""
    return torch.zeros(_MAX_BLOCKS, dtype=torch.int32, device=device)


def _splits(rows: int, columns: int) -> int:
    each = 512 if rows <= _FEW else 2_048 if rows <= _SOME else columns
    return max(1, min(_MAX_SPLITS, columns // each))


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["ranks", "ranks_stride", "slots", "rows"])
def _shrink(
    x, a, ranks, slots, rows, partial, arrived, low, a_stride, ranks_stride,
    COLUMNS: tl.constexpr, RANK: tl.constexpr, MODULES: tl.constexpr, SPLITS: tl.constexpr, SPLITS_UP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, IEEE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_R ranks of one module for a tile's rows, over one of SPLITS parts of the columns.

    Dependents start only when all kernels before this one have ended. So the product that follows may read x at once,
    and `_expand`, the next but one, may read what earlier kernels wrote before it waits.
    """
    GROUPS: tl.constexpr = RANK // BLOCK_R
    EACH: tl.constexpr = (COLUMNS + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    split = tl.program_id(0) % SPLITS
    group = tl.program_id(0) // SPLITS % GROUPS
    module = tl.program_id(0) // (SPLITS * GROUPS) % MODULES
    tile = tl.program_id(0) // (SPLITS * GROUPS * MODULES)
    place = tl.arange(0, BLOCK_M)
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    slot = tl.load(slots + tile)
    row = tl.load(rows + tile * BLOCK_M + place)
    if slot == 0:
        return
    if GROUPS > 1 and tl.load(ranks + (slot - 1) * ranks_stride) <= group * BLOCK_R:
        return
    used = row >= 0
    rank = module * RANK + group * BLOCK_R + tl.arange(0, BLOCK_R)
    a += (slot - 1) * a_stride
    sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for first in range(0, EACH, BLOCK_K):
        column = split * EACH + first + tl.arange(0, BLOCK_K)
        inside = column < COLUMNS
        own = tl.load(x + row[:, None] * COLUMNS + column[None, :], used[:, None] & inside[None, :], 0.0)
        weight = tl.load(a + rank[:, None] * COLUMNS + column[None, :], inside[None, :], 0.0)
        if IEEE:
            sums = tl.dot(own, tl.trans(weight), sums, input_precision="ieee")
        else:
            sums = tl.dot(own, tl.trans(weight), sums)
    to = low + row[:, None] * (MODULES * RANK) + rank[None, :]
    block = tl.program_id(0) // SPLITS
    store_split_sum(sums, to, used[:, None], partial, arrived, block, split, SPLITS, SPLITS_UP, BLOCK_M, BLOCK_R)


@triton.jit
def store_split_sum(
    sums, to, mask, partial, arrived, block, split, splits,
    SPLITS_UP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Store sums [BLOCK_M, BLOCK_R] of which each of `splits` programs, at most SPLITS_UP, has a part of the columns.

    The last program adds the parts up, in the order of the columns.
    """
    if splits == 1:
        tl.store(to, sums.to(to.dtype.element_ty), mask)
    else:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_R
        own_part = tl.arange(0, BLOCK_M)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
        tl.store(partial + (block * splits + split) * SIZE + own_part, sums)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(arrived + block, 1) == splits - 1:
            tl.store(arrived + block, 0)
            part = tl.arange(0, SPLITS_UP)
            others = tl.load(
                partial + (block * splits + part)[:, None, None] * SIZE + own_part[None, :, :],
                (part < splits)[:, None, None],
                0.0,
                cache_modifier=".cg",
            )
            tl.store(to, tl.sum(others, 0).to(to.dtype.element_ty), mask)


@fast_launch
@triton.jit(
    do_not_specialize=["tiles", "step"],
    do_not_specialize_on_alignment=["ranks", "ranks_stride", "factors", "summands", "scaled", "slots", "rows"],
)
def _expand(
    low, b, ranks, factors, summands, scaled, slots, rows, y, tiles, step, b_stride, ranks_stride,
    ROWS_0: tl.constexpr, ROWS_1: tl.constexpr, ROWS_2: tl.constexpr, RANK: tl.constexpr, MODULES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, IEEE: tl.constexpr, SCALED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Update BLOCK_N outputs of one module for the rows of each `step`th tile.

    The kernel reads tiles and the first weights before the product has ended.
    """
    release_dependents(OVERLAP)
    BLOCKS_0: tl.constexpr = (ROWS_0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (ROWS_1 + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = BLOCKS_1 + (ROWS_2 + BLOCK_N - 1) // BLOCK_N
    OUTPUTS: tl.constexpr = ROWS_0 + ROWS_1 + ROWS_2
    block = tl.program_id(0) % BLOCKS
    tile = tl.program_id(0) // BLOCKS
    module = (block >= BLOCKS_0).to(tl.int32) + (block >= BLOCKS_1).to(tl.int32)
    outputs = tl.where(module == 0, ROWS_0, tl.where(module == 1, ROWS_1, ROWS_2))
    before = tl.where(module == 0, 0, tl.where(module == 1, ROWS_0, ROWS_0 + ROWS_1))
    block -= tl.where(module == 0, 0, tl.where(module == 1, BLOCKS_0, BLOCKS_1))
    place = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = place < outputs
    output = before + place
    slot = tl.load(slots + tile)
    if slot == 0:
        _wait_for_all(tile, OVERLAP)
        return
    while slot != 0:
        row = tl.load(rows + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        used = tl.load(ranks + (slot - 1) * ranks_stride)
        rescaled = tl.load(scaled + (slot - 1) * ranks_stride) if SCALED else 0
        weight = _rows_of_b(b, slot, output, inside, b_stride, 0, RANK, BLOCK_R)
        tile += step
        slot_behind = tl.load(slots + tile, tile < tiles, 0)
        to = y + row[:, None] * OUTPUTS + output[None, :]
        mask = (row >= 0)[:, None] & inside[None, :]
        wait_for_inputs(OVERLAP)
        own = _low_of_rows(low, row, module, RANK, MODULES, BLOCK_R)
        made = tl.load(to, mask, 0.0)
        if used != 0:
            whole = made.to(tl.float32)
            if SCALED:
                whole = scaled_outputs(whole, factors, summands, rescaled, slot, output, inside, b_stride)
            whole += _b_low(
                low, b, own, weight, slot, used, row, module, output, inside, b_stride, RANK, MODULES, BLOCK_R, IEEE
            )
            tl.store(to, whole.to(y.dtype.element_ty), mask)
        slot = slot_behind


@fast_launch
@triton.jit(
    do_not_specialize=["tiles", "step"],
    do_not_specialize_on_alignment=["ranks", "ranks_stride", "factors", "summands", "scaled", "slots", "rows"],
)
def _expand_silu_and_mul(
    low, b, ranks, factors, summands, scaled, slots, rows, y, out, tiles, step, b_stride, ranks_stride,
    WIDTH: tl.constexpr, RANK: tl.constexpr, MODULES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, IEEE: tl.constexpr, SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N results for the rows of each `step`th tile, with an adapter or without."""
    release_dependents(OVERLAP)
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    FETCHED: tl.constexpr = BLOCK_N * (RANK & -RANK)  # of a tile's weights, a power of two
    block = tl.program_id(0) % BLOCKS
    place = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = place < WIDTH
    gates_and_ups = tl.arange(0, 2) * (WIDTH * RANK)
    tile = tl.program_id(0) // BLOCKS
    first = tl.load(rows + tile * BLOCK_M)
    if first < 0:
        _wait_for_all(tile, OVERLAP)
        return
    slot = tl.load(slots + tile)
    while first >= 0:
        row = tl.load(rows + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        used = tl.load(ranks + (slot - 1) * ranks_stride, slot != 0, 0)
        rescaled = tl.load(scaled + (slot - 1) * ranks_stride, slot != 0, 0) if SCALED else 0
        mask = (row >= 0)[:, None] & inside[None, :]
        changed = place < tl.where(slot != 0, WIDTH, 0)  # whether its rank is 0 is not known yet
        gate_weight = _rows_of_b(b, slot, place, changed, b_stride, 0, RANK, BLOCK_R)
        up_weight = _rows_of_b(b, slot, WIDTH + place, changed, b_stride, 0, RANK, BLOCK_R)
        tile += step
        first = tl.load(rows + tile * BLOCK_M, tile < tiles, -1)
        slot_behind = tl.load(slots + tile, tile < tiles, 0)
        at = y + row[:, None] * (2 * WIDTH) + place[None, :]
        wait_for_inputs(OVERLAP)
        gate_low = _low_of_rows(low, row, 0, RANK, MODULES, BLOCK_R)
        up_low = _low_of_rows(low, row, MODULES - 1, RANK, MODULES, BLOCK_R)
        gate = tl.load(at, mask, 0.0)
        up = tl.load(at + WIDTH, mask, 0.0)
        if OVERLAP and slot_behind != 0:
            b_behind = b + (slot_behind - 1) * b_stride
            fetch_ahead(b_behind, gates_and_ups, block * (BLOCK_N * RANK), WIDTH * RANK, 2, FETCHED)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        if used != 0:
            if SCALED:
                gate = scaled_outputs(gate, factors, summands, rescaled, slot, place, inside, b_stride)
                up = scaled_outputs(up, factors, summands, rescaled, slot, WIDTH + place, inside, b_stride)
            gate += _b_low(
                low, b, gate_low, gate_weight, slot, used, row, 0, place, inside, b_stride,
                RANK, MODULES, BLOCK_R, IEEE,
            )  # fmt: skip
            up += _b_low(
                low, b, up_low, up_weight, slot, used, row, MODULES - 1, WIDTH + place, inside, b_stride,
                RANK, MODULES, BLOCK_R, IEEE,
            )  # fmt: skip
        gate = gate.to(y.dtype.element_ty)
        up = up.to(y.dtype.element_ty)
        tl.store(out + row[:, None] * WIDTH + place[None, :], gated_silu(gate, up), mask)
        slot = slot_behind


@triton.jit
def _wait_for_all(tile, OVERLAP: tl.constexpr):
    """End a program without rows; programs of the first tile wait for their inputs first.

    A kernel that waits for this one must see the work of the kernels before it. The other programs end at once, which
    leaves their room to the next kernel.
    """
    if tile == 0:
        wait_for_inputs(OVERLAP)


@triton.jit
def _rows_of_b(b, slot, output, inside, b_stride, first, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return B of an adapter [outputs, BLOCK_R], starting at rank `first`."""
    rank = first + tl.arange(0, BLOCK_R)
    return tl.load(b + (slot - 1) * b_stride + output[:, None] * RANK + rank[None, :], inside[:, None], 0.0)


@triton.jit
def scaled_outputs(whole, factors, summands, rescaled, slot, output, inside, b_stride):
    """Return a product's outputs [rows, outputs], scaled by the adapter's magnitudes if it has any."""
    if rescaled != 0:
        at_output = (slot - 1) * b_stride + output
        factor = tl.load(factors + at_output, inside, 0.0).to(tl.float32)
        summand = tl.load(summands + at_output, inside, 0.0).to(tl.float32)
        whole += whole * factor[None, :] + summand[None, :]
    return whole


@triton.jit
def _low_of_rows(low, row, module, RANK: tl.constexpr, MODULES: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return the first ranks of A x [rows, BLOCK_R]; they are undefined where the adapter changes nothing.

    They are read together with the product's result rather than after it.
    """
    at = low + row[:, None] * (MODULES * RANK) + module * RANK + tl.arange(0, BLOCK_R)[None, :]
    return tl.load(at, (row >= 0)[:, None], 0.0)


@triton.jit
def _b_low(
    low, b, own, weight, slot, used, row, module, output, inside, b_stride,
    RANK: tl.constexpr, MODULES: tl.constexpr, BLOCK_R: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Return B A x of a tile's rows [rows, outputs]; `own` and `weight` are the first ranks of A x and of B."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    sums = tl.dot(own, tl.trans(weight), input_precision=precision)
    for first in range(BLOCK_R, used, BLOCK_R):
        more = _rows_of_b(b, slot, output, inside, b_stride, first, RANK, BLOCK_R)
        part = _low_of_rows(low + first, row, module, RANK, MODULES, BLOCK_R)
        sums = tl.dot(part, tl.trans(more), sums, input_precision=precision)
    return sums
