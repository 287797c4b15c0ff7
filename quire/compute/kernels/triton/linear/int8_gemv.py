"""y = x Wᵀ for one row of int8 codes and a weight of them with a scale for each output: gemv.py with half its bytes.

Four products of codes and their sum are one instruction (`dp4a`), on words of four codes as they lie in memory, where
turning codes into fp32 would take longer than reading them. Sums of codes are exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.scaled_linear import ScaledWeight
from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.linear.gemv import GemvConfig
from quire.compute.kernels.triton.linear.inner_loops import gated, weight_rows

_MAX_COLUMNS = 2**17
"""Whose sums 32 bits hold."""


def supports_int8_gemv(weight: ScaledWeight) -> bool:
    """Whether words of codes can be read 16 bytes at a time, and outputs have one scale each."""
    columns = weight.codes.shape[1]
    return (
        weight.codes.dtype == torch.int8
        and weight.scales.shape[1] == 1
        and weight.block[0] == 1
        and columns % 16 == 0
        and columns <= _MAX_COLUMNS
    )


def int8_gemv(
    x: tuple[Tensor, Tensor],
    weight: ScaledWeight,
    bias: Tensor | None,
    y: Tensor,
    config: GemvConfig,
    gate: bool,
    overlap: bool,
) -> None:
    """y = x Wᵀ + bias, or silu of its first half times the second where `gate`.

    Args:
        x: [1, columns] codes and [1, 1] scales, as quantize_rows makes them.
        y: [1, outputs].
    """
    codes, scales = x
    outputs, columns = y.shape[1], weight.codes.shape[1]
    made = config.block_n // 2 if gate else config.block_n
    _int8_gemv_kernel[(cdiv(outputs, made),)](
        codes.view(torch.int32), scales, weight.codes.view(torch.int32), weight.scales,
        weight.codes if bias is None else bias, y, outputs,
        WORDS=columns // 4, BLOCK_N=config.block_n, BLOCK_K=config.block_k // 4, GATED=gate, BIASED=bias is not None,
        DP4A=codes.is_cuda, OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit
def _int8_gemv_kernel(
    x, x_scale, w, w_scales, bias, y, outputs,
    WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    DP4A: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The next part of w is asked for before the last one is used, and the first before x is there."""
    release_dependents(OVERLAP)
    MADE: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    begin = tl.program_id(0) * MADE
    rows = weight_rows(begin, outputs, BLOCK_N, GATED)
    k = tl.arange(0, BLOCK_K)
    pointers = w + rows[:, None] * WORDS + k[None, :]
    ahead = tl.load(pointers, (k < WORDS)[None, :], 0, eviction_policy="evict_first")
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.int32)
    for first in tl.static_range(0, WORDS, BLOCK_K):
        part = ahead
        if first + BLOCK_K < WORDS:
            pointers += BLOCK_K
            inside = (first + BLOCK_K + k < WORDS)[None, :]
            ahead = tl.load(pointers, inside, 0, eviction_policy="evict_first")
        values = tl.load(x + first + k, first + k < WORDS, 0)
        sums = _add_products(sums, part, values[None, :], DP4A)
    values = tl.sum(sums, 1).to(tl.float32) * tl.load(x_scale) * tl.load(w_scales + rows)
    if BIASED:
        values += tl.load(bias + rows).to(tl.float32)
    if GATED:
        values = tl.reshape(gated(values[None, :], 1, MADE), (MADE,))
    n = begin + tl.arange(0, MADE)
    tl.store(y + n, values.to(y.dtype.element_ty), n < outputs)


@triton.jit
def _add_products(sums, a, b, DP4A: tl.constexpr):
    """sums + the products of four int8 each in the words a and b. Without DP4A as the interpreter can."""
    if DP4A:
        sums = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, sums], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            sums += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return sums
