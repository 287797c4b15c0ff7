"""Expands a weight of codes into a dense one, for a library's product.

With many rows of x this costs less than expanding codes for each tile, and it serves forms that no other kernel takes.
It reads half a byte or a byte for each value of the weight and writes two; a program expands a part of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.linear import RUN, CodebookWeight, GroupedWeight
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.linear.coded_gemm import scale_values
from quire.compute.kernels.triton.linear.packed_layout import FIRST_INTEGER, PackedWeight

BLOCK = 1024


def expand_packed(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight as [rows, columns] of `dtype`, gates before ups."""
    dense = torch.empty((weight.rows, weight.columns), dtype=dtype, device=weight.words.device)
    _expand_packed[(weight.rows, cdiv(weight.columns, BLOCK))](
        weight.words, weight.scales, weight.scales if weight.zeros is None else weight.zeros, dense,
        weight.rows, weight.columns,
        FIRST_INTEGER=float(FIRST_INTEGER[weight.scales.dtype]), SYMMETRIC=weight.zeros is None, GATED=weight.gated,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return dense


def expand_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight as [rows, columns] of `dtype`, its columns in the weight's order."""
    rows, columns = len(weight.packed), weight.columns
    dense = torch.empty((rows, columns), dtype=dtype, device=weight.packed.device)
    _expand_grouped[(rows, cdiv(columns, BLOCK))](
        weight.packed, weight.scales, weight.scales if weight.zeros is None else weight.zeros, dense,
        columns, weight.group,
        SYMMETRIC=weight.zeros is None, BITS=weight.bits, RUN=RUN, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return dense


def expand_codebook(weight: CodebookWeight, dtype: torch.dtype) -> Tensor:
    rows, columns = len(weight.packed), weight.columns
    dense = torch.empty((rows, columns), dtype=dtype, device=weight.packed.device)
    exponents = weight.scales.dtype == torch.float8_e8m0fnu
    _expand_codebook[(rows, cdiv(columns, BLOCK))](
        weight.packed, weight.scales.view(torch.uint8) if exponents else weight.scales,
        weight.table if weight.factors is None else weight.factors, weight.table, dense, columns, weight.group,
        EXPONENTS=exponents, FACTORS=weight.factors is not None, RUN=RUN, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return dense


@fast_launch
@triton.jit
def _expand_packed(
    words, scales, zeros, dense, rows, columns,
    FIRST_INTEGER: tl.constexpr, SYMMETRIC: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    groups = columns // 128
    group = column // 128
    tile = row // 16
    high = row % 16 // 8
    # bits of the column in its group: half, ehi, l (2), s, c, e
    word = (column // 64 % 2) * 128 + row % 8 * 16 + column // 8 % 4 * 4 + column // 32 % 2 * 2 + column // 4 % 2
    shift = (column % 2 * 4 + column // 2 % 2 * 2 + high) * 4
    found = tl.load(words + (tile.to(tl.int64) * groups + group) * 256 + word, inside, 0)
    place = (tile * groups + group) * 16 + row % 8 * 2 + high
    scale = tl.load(scales + place, inside, 0.0).to(tl.float32)
    if SYMMETRIC:
        zero = 8.0
    else:
        zero = tl.load(zeros + place, inside, 0.0).to(tl.float32) - FIRST_INTEGER
    value = (((found >> shift) & 15).to(tl.float32) - zero) * scale
    to = row
    if GATED:
        to = tile * 8 + row % 8 + high * (rows // 2)
    tl.store(dense + to.to(tl.int64) * columns + column, value.to(dense.dtype.element_ty), inside)


@fast_launch
@triton.jit
def _expand_grouped(
    packed, scales, zeros, dense, columns, group,
    SYMMETRIC: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    if BITS == 4:
        byte = tl.load(packed + row * (columns // 2) + column // (2 * RUN) * RUN + column % RUN, inside, 0)
        code = (byte.to(tl.int32) >> (column // RUN % 2 * 4)) & 15
    else:
        code = tl.load(packed + row * columns + column, inside, 0).to(tl.int32)
    place = row * (columns // group) + column // group
    scale = tl.load(scales + place, inside, 0.0)
    if SYMMETRIC:
        zero = (1 << (BITS - 1)) * 1.0
    else:
        zero = tl.load(zeros + place, inside, 0).to(tl.float32)
    value = (code.to(tl.float32) - zero) * scale
    tl.store(dense + row * columns + column, value.to(dense.dtype.element_ty), inside)


@fast_launch
@triton.jit
def _expand_codebook(
    packed, scales, factors, table, dense, columns, group,
    EXPONENTS: tl.constexpr, FACTORS: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    byte = tl.load(packed + row * (columns // 2) + column // (2 * RUN) * RUN + column % RUN, inside, 0)
    code = (byte.to(tl.int32) >> (column // RUN % 2 * 4)) & 15
    scale = scale_values(tl.load(scales + row * (columns // group) + column // group, inside, 0.0), EXPONENTS)
    if FACTORS:
        scale *= tl.load(factors + row)
    value = tl.load(table + code) * scale
    tl.store(dense + row * columns + column, value.to(dense.dtype.element_ty), inside)
