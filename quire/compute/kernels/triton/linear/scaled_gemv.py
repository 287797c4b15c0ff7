"""y = x Wᵀ for one row of dense x and a weight of 8-bit codes with scales: as gemv.py, with half of its bytes.

Codes become fp32 in registers, so x need not be quantized: one launch less, and no error of it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.scaled_linear import ScaledWeight
from quire.compute.kernels.triton.launching.dependent_launch import release_dependents
from quire.compute.kernels.triton.launching.launch import fast_launch
from quire.compute.kernels.triton.linear.gemv import GemvConfig
from quire.compute.kernels.triton.linear.inner_loops import gated, gemv_loop, weight_rows


def scaled_gemv(
    x: Tensor, weight: ScaledWeight, bias: Tensor | None, y: Tensor, config: GemvConfig, gate: bool, overlap: bool
) -> None:
    """y = x Wᵀ + bias, or silu of its first half times the second where `gate`: x [1, columns], y [1, outputs]."""
    outputs = y.shape[1]
    made = config.block_n // 2 if gate else config.block_n
    _scaled_gemv_kernel[(-(-outputs // made),)](
        x, weight.codes, weight.scales, weight.codes if bias is None else bias, y, outputs,
        COLUMNS=weight.codes.shape[1], SCALE_ROWS=weight.block[0], SCALE_COLUMNS=weight.block[1],
        GROUPS=weight.scales.shape[1], BLOCK_N=config.block_n, BLOCK_K=config.block_k, GATED=gate,
        BIASED=bias is not None, OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit
def _scaled_gemv_kernel(
    x, w, scales, bias, y, outputs, COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    MADE: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    begin = tl.program_id(0) * MADE
    rows = weight_rows(begin, outputs, BLOCK_N, GATED)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if GROUPS == 1:
        sums = gemv_loop(sums, x, w, rows, COLUMNS, BLOCK_K, OVERLAP)
        values = tl.sum(sums, 1) * tl.load(scales + rows)
    else:
        own = scales + rows // SCALE_ROWS * GROUPS
        sums = gemv_loop(sums, x, w, rows, COLUMNS, BLOCK_K, OVERLAP, own, SCALE_COLUMNS)
        values = tl.sum(sums, 1)
    if BIASED:
        values += tl.load(bias + rows).to(tl.float32)
    if GATED:
        values = tl.reshape(gated(values[None, :], 1, MADE), (MADE,))
    n = begin + tl.arange(0, MADE)
    tl.store(y + n, values.to(y.dtype.element_ty), n < outputs)
