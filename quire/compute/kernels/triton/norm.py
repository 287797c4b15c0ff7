"""Norms of whole rows, and rows as 8-bit codes with scales, in one pass over memory.

A program keeps its rows in registers from the first load to the last store. A norm of w elements costs 2 w elements of
traffic (x in, out out), or 4 w where something is added first (x and delta in, x and out out); codes take half of the
bytes of bf16. The weight stays in the cache. A wide row has a program of its own, with so many threads that each moves
16 to 64 bytes of every tensor, all requested at once, because latency decides the time of few rows. Narrow rows, such
as heads, share a program; so do several groups of columns that have scales of their own.

`rms_norm_quantized` rounds values to the row's dtype before it quantizes them, so its codes are those of `rms_norm`
followed by `quantize_rows`."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.quantized_rows import LARGEST, SMALLEST, QuantizedRows
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2

WIDEST = 32_768
"""Elements of a row that fit the registers of 1,024 threads."""
TILE = 1_024
"""Elements of a program of narrow rows."""
PER_THREAD = 8
"""Elements of a thread, 16 bytes of bf16, measured by tuning/h200/tune_small.py. Threads of wider rows have more."""
GROUPS = 8
"""The maximum number of groups of a row that one program quantizes."""
_QUANTIZED_PER_THREAD = 16
"""Elements of a thread that quantizes."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, delta: Tensor | None = None) -> None:
    """Implement reference/norm.py's `rms_norm`; x is [tokens, width] or [tokens, heads, width], and may be a part of a
    wider tensor.

    All other tensors are contiguous.

    Raises:
        ValueError: A row is wider than WIDEST.
    """
    shape, strides = x.shape, x.stride()
    heads, width = (1, *shape[1:])[-2:]
    rows, (block, tile, warps) = shape[0] * heads, program_shape(width, TILE, PER_THREAD)
    assert strides[-1] == 1 and weight.is_contiguous() and out.is_contiguous()
    assert delta is None or delta.is_contiguous()
    if not rows:
        return
    overlap = can_overlap(x.device)
    _rms_norm[(cdiv(rows, tile),)](
        x, delta, weight, out, rows, strides[0], strides[-2], eps,
        HEADS=heads, EACH=weight.dim() == 2, WIDTH=width, BLOCK=block, TILE=tile, OVERLAP=overlap,
        num_warps=warps, launch_pdl=overlap,
    )  # fmt: skip


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, delta: Tensor | None = None) -> None:
    """Implement reference/norm.py's `layer_norm`; all tensors are contiguous.

    Raises:
        ValueError: A row is wider than WIDEST.
    """
    rows, width = x.shape
    block, _, warps = program_shape(width, 1, PER_THREAD)
    assert x.is_contiguous() and weight.is_contiguous() and bias.is_contiguous() and out.is_contiguous()
    assert delta is None or delta.is_contiguous()
    if not rows:
        return
    overlap = can_overlap(x.device)
    _layer_norm[(rows,)](
        x, delta, weight, bias, out, eps,
        WIDTH=width, BLOCK=block, OVERLAP=overlap, num_warps=warps, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, delta, weight, out, rows, x_token, x_head, eps,
    HEADS: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm TILE rows: row r is head r % HEADS of token r // HEADS. Where EACH, every head has a weight of its own."""
    release_dependents(OVERLAP)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    mask = (row < rows)[:, None] & inside[None, :]
    if EACH:
        w = tl.load(weight + (row % HEADS * WIDTH)[:, None] + column[None, :], mask, 0.0)
    else:
        w = tl.load(weight + column, inside, 0.0)[None, :]
    wait_for_inputs(OVERLAP)
    row = row.to(tl.int64)
    own = (row * WIDTH)[:, None] + column[None, :]
    theirs = (row // HEADS * x_token + row % HEADS * x_head)[:, None] + column[None, :]
    values = tl.load(x + theirs, mask, 0.0)
    if delta is not None:
        values = (values.to(tl.float32) + tl.load(delta + own, mask, 0.0).to(tl.float32)).to(values.dtype)
        tl.store(x + theirs, values, mask)
    tl.store(out + own, rms_normed(values, w, eps, WIDTH, out.dtype.element_ty), mask)


@triton.jit
def rms_normed(values, w, eps, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """Return the norms of rows [rows, columns] times w [rows or 1, columns]; columns behind WIDTH are 0."""
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
    if w.dtype == DTYPE:
        normed = normed.to(w.dtype).to(tl.float32)
    return (normed * w.to(tl.float32)).to(DTYPE)


@fast_launch
@triton.jit
def _layer_norm(
    x, delta, weight, bias, out, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    w = tl.load(weight + column, inside, 0.0).to(tl.float32)
    b = tl.load(bias + column, inside, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    own = tl.program_id(0).to(tl.int64) * WIDTH + column
    values = tl.load(x + own, inside, 0.0)
    if delta is not None:
        values = (values.to(tl.float32) + tl.load(delta + own, inside, 0.0).to(tl.float32)).to(values.dtype)
        tl.store(x + own, values, inside)
    wide = values.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide) / WIDTH, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    tl.store(out + own, (normed * w + b).to(out.dtype.element_ty), inside)


@functools.cache
def program_shape(width: int, tile: int, per_thread: int) -> tuple[int, int, int]:
    """Return, for rows of this width, their elements with padding, and the rows and warps of a program.

    A program has at least `tile` elements.
    """
    if width > WIDEST:
        raise ValueError(f"Norms of rows of {width} elements are not supported on a GPU: at most {WIDEST}.")
    block = next_power_of_2(width)
    rows = max(1, tile // block)
    return block, rows, min(32, max(1, rows * block // (32 * per_thread)))


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """The columns of x lie side by side."""
    rows, columns = x.shape
    group = min(group, columns)
    groups = cdiv(columns, group)
    codes = torch.empty((rows, columns), dtype=dtype, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if not rows:
        return codes, scales
    block, tile = next_power_of_2(group), min(GROUPS, next_power_of_2(groups))
    overlap = can_overlap(x.device)
    _quantize_rows[(rows, cdiv(groups, tile))](
        x, codes, scales, x.stride(0), LARGEST[dtype], SMALLEST,
        COLUMNS=columns, GROUP=group, GROUPS=groups, BLOCK=block, TILE=tile, OVERLAP=overlap,
        num_warps=min(16, max(1, tile * block // (32 * _QUANTIZED_PER_THREAD))), launch_pdl=overlap,
    )  # fmt: skip
    return codes, scales


@fast_launch
@triton.jit
def _quantize_rows(
    x, codes, scales, x_stride, largest, smallest, COLUMNS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wait_for_inputs(OVERLAP)
    quantize_groups(
        x + row * x_stride, codes + row * COLUMNS, scales + row * GROUPS, group, largest, smallest,
        COLUMNS, GROUP, GROUPS, BLOCK,
    )  # fmt: skip


@triton.jit
def quantize_groups(
    x, codes, scales, group, largest, smallest, COLUMNS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write codes and scales of some groups [TILE] of a row, each of GROUP of its COLUMNS; BLOCK has room for one."""
    within = tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + within[None, :]
    inside = (within < GROUP)[None, :] & (column < COLUMNS)
    values = tl.load(x + column, inside, 0.0).to(tl.float32)
    scale, shrink = row_scales(values, largest, smallest, 1)
    tl.store(codes + column, to_codes(values * shrink[:, None], codes.dtype.element_ty), inside)
    tl.store(scales + group, scale, group < GROUPS)


@triton.jit
def to_codes(values, DTYPE: tl.constexpr):
    """Return values in the range of codes as codes."""
    if tl.int8 == DTYPE:
        values = (values + 12582912.0) - 12582912.0  # to the nearest integer, even at halves: 1.5 · 2^23
    return values.to(DTYPE)


@triton.jit
def row_scales(values, largest, smallest, AXIS: tl.constexpr):
    """Return scales of fp32 values along an axis, NaN where a value is not finite, and factors that make codes of them.

    Magnitudes are compared as integers, of which those of NaN are the largest: one operation a value.
    """
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.max(magnitudes, AXIS).to(tl.float32, bitcast=True)
    most = tl.maximum(most, smallest, propagate_nan=tl.PropagateNan.ALL)
    scale = most / largest
    return scale + (most - most), 1.0 / scale


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, delta: Tensor | None = None
) -> QuantizedRows:
    """The columns of x lie side by side; the others are contiguous."""
    rows, width = x.shape
    codes = torch.empty((rows, width), dtype=dtype, device=x.device)
    made = QuantizedRows(codes, torch.empty((rows, 1), dtype=torch.float32, device=x.device), x.dtype)
    assert x.stride(1) == 1 and weight.is_contiguous() and (delta is None or delta.is_contiguous())
    if rows:
        overlap, block = can_overlap(x.device), next_power_of_2(width)
        _rms_norm_quantized[(rows,)](
            x, delta, weight, made.codes, made.scales, x.stride(0), eps, LARGEST[dtype], SMALLEST,
            WIDTH=width, BLOCK=block, OVERLAP=overlap,
            num_warps=min(32, max(1, block // (32 * PER_THREAD))), launch_pdl=overlap,
        )  # fmt: skip
    return made


@fast_launch
@triton.jit
def _rms_norm_quantized(
    x, delta, weight, codes, scales, x_stride, eps, largest, smallest,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    w = tl.load(weight + column, inside, 0.0)
    wait_for_inputs(OVERLAP)
    values = tl.load(x + row * x_stride + column, inside, 0.0)
    if delta is not None:
        more = tl.load(delta + row * WIDTH + column, inside, 0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(x + row * x_stride + column, values, inside)
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
    if w.dtype == values.dtype:
        normed = normed.to(values.dtype).to(tl.float32)
    normed = (normed * w.to(tl.float32)).to(values.dtype).to(tl.float32)
    scale, shrink = row_scales(normed, largest, smallest, 0)
    tl.store(codes + row * WIDTH + column, to_codes(normed * shrink, codes.dtype.element_ty), inside)
    tl.store(scales + row, scale)
