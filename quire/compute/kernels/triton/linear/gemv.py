"""Computes y = x Wᵀ for one row of x, by a weight that is dense or 8-bit codes with scales.

Each program multiplies x with a few rows of W, whose bytes are read once, in 16-byte loads; x stays in the cache. Sums
are in a fixed order. fp8 codes become fp32 in registers, so x need not be quantized. Turning int8 codes into fp32 would
take longer than reading them: x is quantized, and one instruction (`dp4a`) multiplies and adds four codes of a word.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.reference.quantized_rows import UnnormedRow
from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2
from quire.compute.kernels.triton.linear.inner_loops import gated, gemv_loop, weight_rows

_MAX_COLUMNS = 2**17
"""The maximum number of columns whose sum of int8 products fits 32 bits."""


@dataclass(frozen=True)
class GemvConfig:
    """How the work is divided into programs.

    Attributes:
        block_n: Rows of W for each program; gates and ups together where the product is gated.
        block_k: Columns of a step.
        warps: Warps of a program.
    """

    block_n: int
    block_k: int
    warps: int


def gemv(
    x: Tensor, w: Tensor | ScaledWeight, bias: Tensor | None, y: Tensor, config: GemvConfig, gate: bool, overlap: bool
) -> None:
    """Write x Wᵀ + bias to y, or silu of its first half times the second if `gate`: x [1, columns], y [1, outputs]."""
    values, scales, block = (w, None, (1, 1)) if isinstance(w, Tensor) else w
    outputs = y.shape[1]
    _gemv_kernel[(cdiv(outputs, config.block_n // 2 if gate else config.block_n),)](
        x, values, scales, values if bias is None else bias, y, outputs,
        COLUMNS=values.shape[1], SCALE_ROWS=block[0], SCALE_COLUMNS=block[1],
        GROUPS=0 if scales is None else scales.shape[1], BLOCK_N=config.block_n, BLOCK_K=config.block_k, GATED=gate,
        BIASED=bias is not None, OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip


def normed_gemv(
    row: UnnormedRow, w: Tensor, bias: Tensor | None, y: Tensor, config: GemvConfig, gate: bool, overlap: bool
) -> None:
    """Write the norm of a row times Wᵀ, plus bias, to y, or silu of its first half times the second if `gate`; and make
    the row's stream and norm, of which each program writes a part.

    The norm that is multiplied is not rounded. The columns of x and of y [1, outputs] lie side by side.
    """
    outputs, columns = y.shape[1], w.shape[1]
    programs = cdiv(outputs, config.block_n // 2 if gate else config.block_n)
    row.normed = torch.empty_like(row.x)
    row.stream = row.x if row.delta is None else torch.empty_like(row.x)
    _normed_gemv_kernel[(programs,)](
        row.x, row.delta, row.weight, w, w if bias is None else bias, row.stream, row.normed, y, outputs, row.eps,
        COLUMNS=columns, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GATED=gate, BIASED=bias is not None,
        OWN=next_power_of_2(cdiv(columns, programs)), OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip


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
    """Write x Wᵀ + bias to y, or silu of its first half times the second if `gate`.

    Args:
        x: [1, columns] codes and [1, 1] scales, as quantize_rows makes them.
        y: [1, outputs].
    """
    codes, scales = x
    outputs, columns = y.shape[1], weight.codes.shape[1]
    _int8_gemv_kernel[(cdiv(outputs, config.block_n // 2 if gate else config.block_n),)](
        codes.view(torch.int32), scales, weight.codes.view(torch.int32), weight.scales,
        weight.codes if bias is None else bias, y, outputs,
        WORDS=columns // 4, BLOCK_N=config.block_n, BLOCK_K=config.block_k // 4, GATED=gate, BIASED=bias is not None,
        DP4A=codes.is_cuda, OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit
def _gemv_kernel(
    x, w, scales, bias, y, outputs, COLUMNS: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    begin = tl.program_id(0) * (BLOCK_N // 2 if GATED else BLOCK_N)
    rows = weight_rows(begin, outputs, BLOCK_N, GATED)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if scales is None:
        values = tl.sum(gemv_loop(sums, x, w, rows, COLUMNS, BLOCK_K, OVERLAP), 1)
    elif GROUPS == 1:
        values = tl.sum(gemv_loop(sums, x, w, rows, COLUMNS, BLOCK_K, OVERLAP), 1) * tl.load(scales + rows)
    else:
        own = scales + rows // SCALE_ROWS * GROUPS
        values = tl.sum(gemv_loop(sums, x, w, rows, COLUMNS, BLOCK_K, OVERLAP, own, SCALE_COLUMNS), 1)
    _store_outputs(values, bias, y, rows, begin, outputs, BLOCK_N, GATED, BIASED)


@fast_launch
@triton.jit
def _normed_gemv_kernel(
    x, delta, weight, w, bias, stream, normed, y, outputs, eps, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, OWN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up products and squares in one pass: what a row is divided by is a factor of the sums."""
    release_dependents(OVERLAP)
    begin = tl.program_id(0) * (BLOCK_N // 2 if GATED else BLOCK_N)
    rows = weight_rows(begin, outputs, BLOCK_N, GATED)
    k = tl.arange(0, BLOCK_K)
    pointers = w + rows[:, None] * COLUMNS + k[None, :]
    ahead = tl.load(pointers, (k < COLUMNS)[None, :], 0.0, eviction_policy="evict_first")
    factors = tl.load(weight + k, k < COLUMNS, 0.0)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.static_range(0, COLUMNS, BLOCK_K):
        part = ahead
        own = factors
        if first + BLOCK_K < COLUMNS:
            pointers += BLOCK_K
            inside = first + BLOCK_K + k < COLUMNS
            ahead = tl.load(pointers, inside[None, :], 0.0, eviction_policy="evict_first")
            factors = tl.load(weight + first + BLOCK_K + k, inside, 0.0)
        values = _stream(x, delta, first + k, COLUMNS).to(tl.float32)
        squares += values * values
        sums += part.to(tl.float32) * (values * own.to(tl.float32))[None, :]
    scale = tl.rsqrt(tl.sum(squares, 0) / COLUMNS + eps)
    _store_outputs(tl.sum(sums, 1) * scale, bias, y, rows, begin, outputs, BLOCK_N, GATED, BIASED)
    column = tl.program_id(0) * OWN + tl.arange(0, OWN)
    inside = column < COLUMNS
    values = _stream(x, delta, column, COLUMNS)
    if delta is not None:
        tl.store(stream + column, values, inside)
    own = tl.load(weight + column, inside, 0.0)
    made = values.to(tl.float32) * scale
    if own.dtype == values.dtype:
        made = made.to(values.dtype).to(tl.float32)
    tl.store(normed + column, (made * own.to(tl.float32)).to(values.dtype), inside)


@triton.jit
def _stream(x, delta, column, COLUMNS: tl.constexpr):
    """Return x plus delta, rounded, in these columns; 0 behind the last one."""
    values = tl.load(x + column, column < COLUMNS, 0.0)
    if delta is not None:
        more = tl.load(delta + column, column < COLUMNS, 0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
    return values


@fast_launch
@triton.jit
def _int8_gemv_kernel(
    x, x_scale, w, w_scales, bias, y, outputs,
    WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    DP4A: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Request each part of w before the previous part is used, and the first one before x is complete."""
    release_dependents(OVERLAP)
    begin = tl.program_id(0) * (BLOCK_N // 2 if GATED else BLOCK_N)
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
    _store_outputs(values, bias, y, rows, begin, outputs, BLOCK_N, GATED, BIASED)


@triton.jit
def _store_outputs(
    values, bias, y, rows, begin, outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr
):
    """Store the outputs of sums [BLOCK_N], starting at output `begin`."""
    MADE: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if BIASED:
        values += tl.load(bias + rows).to(tl.float32)
    if GATED:
        values = tl.reshape(gated(values[None, :], 1, MADE), (MADE,))
    n = begin + tl.arange(0, MADE)
    tl.store(y + n, values.to(y.dtype.element_ty), n < outputs)


@triton.jit
def _add_products(sums, a, b, DP4A: tl.constexpr):
    """Add the products of the four int8 in each word of a and b; without DP4A, as Triton's interpreter can."""
    if DP4A:
        sums = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, sums], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            sums += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return sums
