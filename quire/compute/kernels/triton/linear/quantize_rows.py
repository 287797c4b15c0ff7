"""Rows of activations to 8-bit codes with scales: one pass over memory, 3 bytes of traffic an element of bf16.

A program keeps its row, or several groups of one, in registers from the load to the store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.quantized_rows import LARGEST, SMALLEST
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2

GROUPS = 8
"""Of a program, where a row has several."""
PER_THREAD = 16
"""Elements."""


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """Arguments as in reference/quantized_rows.py; the columns of x lie side by side."""
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
        num_warps=min(16, max(1, tile * block // (32 * PER_THREAD))), launch_pdl=overlap,
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
