"""y = x Wᵀ for few rows of x and a weight of codes in the reference's form, which is expanded as it is multiplied.

It serves what no other kernel takes as it lies: groups of 16, 32 and 64 columns, 8-bit integers in groups, and e2m1.
Tiles are as in gemm.py, without splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.codebook_linear import CodebookWeight
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.linear.coded_loop import AnyCoded, coded_arguments, coded_loop
from quire.compute.kernels.triton.linear.gemm import _tile_at, _write_tile


@dataclass(frozen=True)
class CodedConfig:
    """How the work is divided into programs.

    Attributes:
        block_m, block_n, block_k: Rows of x, rows of W (gates and ups together where the product is gated) and columns
            of a tile; 32 divides the columns.
        warps: Of 32 threads, by program.
        stages: Tiles under way at the same time.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


CONFIG = CodedConfig(16, 16, 128, 2, 4)
"""Measured on an NVIDIA H200: see docs/performance.md."""
MAX_ROWS = CONFIG.block_m
"""Of x; with more, to expand the weight once costs less."""


def suits(x: Tensor, weight: AnyCoded) -> bool:
    """Whether this costs less than to expand the weight: with few rows, and where codes need no look-up."""
    return x.shape[0] <= MAX_ROWS and not (isinstance(weight, CodebookWeight) and weight.values != "e2m1")


def coded_linear(x: Tensor, weight: AnyCoded, bias: Tensor | None, y: Tensor, gate: bool) -> None:
    """y = x Wᵀ + bias, or silu of its first half times the second where `gate`.

    Args:
        x: [rows, columns]; few rows.
        y: [rows, outputs], contiguous.
    """
    if not len(x):
        return
    coded_gemm(x if x.stride(1) == 1 else x.contiguous(), weight, bias, y, CONFIG, gate, can_overlap(x.device))


def coded_gemm(
    x: Tensor, weight: AnyCoded, bias: Tensor | None, y: Tensor, config: CodedConfig, gate: bool, overlap: bool
) -> None:
    """`coded_linear` with this config, and `overlap` as in dependent_launch."""
    rows, outputs = y.shape
    w = coded_arguments(weight)
    tiles = cdiv(outputs, config.block_n // 2 if gate else config.block_n) * cdiv(rows, config.block_m)
    _coded_kernel[(tiles,)](
        x, w.codes, w.scales, w.zeros, w.factors, w.table, w.scales if bias is None else bias, y,
        rows, outputs, w.columns, x.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GATED=gate, BIASED=bias is not None,
        OVERLAP=overlap, **w.facts, num_warps=config.warps, num_stages=config.stages, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _coded_kernel(
    x, codes, scales, zeros, factors, table, bias, y, rows, outputs, columns, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, ZEROS: tl.constexpr,
    EXPONENTS: tl.constexpr, FACTORS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    begin, m, w_rows = _tile_at(tl.program_id(0), tl.cdiv(rows, BLOCK_M), outputs, BLOCK_M, BLOCK_N, GATED)
    wait_for_inputs(OVERLAP)
    sums = coded_loop(
        x, m.to(tl.int64) * x_stride, m < rows, codes, scales, zeros, factors, table, w_rows, columns,
        BLOCK_M, BLOCK_N, BLOCK_K, BITS, GROUP, MIDDLE, ZEROS, EXPONENTS, FACTORS, VALUES,
    )  # fmt: skip
    _write_tile(sums, bias, y, m, w_rows, begin, rows, outputs, BLOCK_M, BLOCK_N, GATED, BIASED)
