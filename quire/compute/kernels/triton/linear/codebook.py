"""Matrix products with 4-bit codes that name one of sixteen values: few rows of x by e2m1 that is expanded as it is
multiplied, all others by a dense weight that is expanded before, and lives for the product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference import codebook_linear as reference
from quire.compute.kernels.reference.codebook_linear import CodebookWeight
from quire.compute.kernels.reference.grouped_linear import RUN
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.linear.coded_gemm import coded_linear, suits
from quire.compute.kernels.triton.linear.coded_loop import scale_values
from quire.compute.kernels.triton.linear.linear import linear_silu_and_mul

_BLOCK = 1024

pack_codebook = reference.pack_codebook


def codebook_linear(x: Tensor, weight: CodebookWeight, bias: Tensor | None) -> Tensor:
    """Arguments as in reference/codebook_linear.py."""
    if suits(x, weight):
        y = x.new_empty((x.shape[0], len(weight.packed)))
        coded_linear(x, weight, bias, y, gate=False)
        return y
    return F.linear(x, expand_codebook(weight, x.dtype), bias)


def codebook_linear_silu_and_mul(x: Tensor, weight: CodebookWeight, bias: Tensor | None, out: Tensor) -> None:
    """Arguments as in reference/codebook_linear.py."""
    if suits(x, weight):
        coded_linear(x, weight, bias, out, gate=True)
        return
    linear_silu_and_mul(x, expand_codebook(weight, x.dtype), bias, out)


def expand_codebook(weight: CodebookWeight, dtype: torch.dtype) -> Tensor:
    """[outputs, columns]."""
    rows, columns = len(weight.packed), weight.columns
    dense = torch.empty((rows, columns), dtype=dtype, device=weight.packed.device)
    exponents = weight.scales.dtype == torch.float8_e8m0fnu
    _expand_codebook[(rows, cdiv(columns, _BLOCK))](
        weight.packed, weight.scales.view(torch.uint8) if exponents else weight.scales,
        weight.table if weight.factors is None else weight.factors, weight.table, dense, columns, weight.group,
        EXPONENTS=exponents, FACTORS=weight.factors is not None, RUN=RUN, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return dense


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
