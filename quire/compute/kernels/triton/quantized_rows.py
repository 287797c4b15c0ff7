"""Norms whose rows are quantized at once, for products of 8-bit codes: one launch and one pass over memory less.

A program keeps its row in registers from the loads to the stores: of w elements of bf16 it moves 3 w bytes, or 7 w with
a delta. Values are rounded to the row's dtype before they are quantized, so codes are those of `rms_norm` and
`quantize_rows` one behind the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.quantized_rows import LARGEST, SMALLEST, QuantizedRows
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch, next_power_of_2
from quire.compute.kernels.triton.linear.quantize_rows import row_scales, to_codes

PER_THREAD = 8
"""Elements, 16 bytes of bf16, of rows so narrow that 1,024 threads or fewer take them."""


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, delta: Tensor | None = None
) -> QuantizedRows:
    """Arguments as in reference/quantized_rows.py; the columns of x lie side by side, the others are contiguous."""
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
