"""y = x Wᵀ for one row of x.

Each program multiplies x with a few rows of W: 2 · outputs · columns bytes of a 16-bit W, read once, in 16-byte loads;
x stays in the cache. Sums are fp32 and in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import release_dependents
from quire.compute.kernels.triton.launching.launch import fast_launch
from quire.compute.kernels.triton.linear.inner_loops import gated, gemv_loop, weight_rows


@dataclass(frozen=True)
class GemvConfig:
    """How the work is divided into programs.

    Attributes:
        block_n: Rows of W by program; gates and ups together where the product is gated.
        block_k: Columns at a time.
        warps: Of 32 threads, by program.
    """

    block_n: int
    block_k: int
    warps: int


def gemv(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, config: GemvConfig, gate: bool, overlap: bool) -> None:
    """y = x Wᵀ + bias, or silu of its first half times the second where `gate`: x [1, columns], y [1, outputs]."""
    outputs = y.shape[1]
    made = config.block_n // 2 if gate else config.block_n
    _gemv_kernel[(-(-outputs // made),)](
        x, w, w if bias is None else bias, y, outputs,
        COLUMNS=w.shape[1], BLOCK_N=config.block_n, BLOCK_K=config.block_k, GATED=gate, BIASED=bias is not None,
        OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit
def _gemv_kernel(
    x, w, bias, y, outputs,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    MADE: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    begin = tl.program_id(0) * MADE
    rows = weight_rows(begin, outputs, BLOCK_N, GATED)
    sums = gemv_loop(tl.zeros((BLOCK_N, BLOCK_K), tl.float32), x, w, rows, COLUMNS, BLOCK_K, OVERLAP)
    values = tl.sum(sums, 1)
    if BIASED:
        values += tl.load(bias + rows).to(tl.float32)
    if GATED:
        values = tl.reshape(gated(values[None, :], 1, MADE), (MADE,))
    n = begin + tl.arange(0, MADE)
    tl.store(y + n, values.to(y.dtype.element_ty), n < outputs)
