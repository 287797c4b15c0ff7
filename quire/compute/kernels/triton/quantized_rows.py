"""Rows of activations as 8-bit codes with scales, and norms that make them, in one pass over memory.

A program keeps its row, or several groups of one, in registers from the loads to the stores: for w elements of bf16
`quantize_rows` moves 3 w bytes, `rms_norm_quantized` 3 w, or 7 w with a delta. The norm rounds values to the row's
dtype before it quantizes them, so its codes are those of `rms_norm` followed by `quantize_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.quantized_rows import LARGEST, SMALLEST, QuantizedRows
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2

GROUPS = 8
"""Of a program, where a row has several."""
_PER_THREAD = 16
"""Elements of a thread."""


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
        num_warps=min(16, max(1, tile * block // (32 * _PER_THREAD))), launch_pdl=overlap,
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
    """Values in the range of codes, as such."""
    if tl.int8 == DTYPE:
        values = (values + 12582912.0) - 12582912.0  # to the nearest integer, even at halves: 1.5 · 2^23
    return values.to(DTYPE)


@triton.jit
def row_scales(values, largest, smallest, AXIS: tl.constexpr):
    """Scales of fp32 values along an axis, NaN where one of them is not finite, and what makes codes of them.

    Magnitudes are compared as integers, of which those of NaN are the largest: one operation a value.
    """
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.max(magnitudes, AXIS).to(tl.float32, bitcast=True)
    most = tl.maximum(most, smallest, propagate_nan=tl.PropagateNan.ALL)
    scale = most / largest
    return scale + (most - most), 1.0 / scale


PER_THREAD = 8
"""Elements of a thread, 16 bytes of bf16, in rows that 1,024 threads can take."""


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
