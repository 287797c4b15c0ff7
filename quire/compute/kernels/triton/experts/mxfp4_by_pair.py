"""Computes a mixture of experts in mxfp4 for few tokens, of which hardly two go to the same expert.

As `gemv_by_pair` does for other weights, a program of the first kernel multiplies one (token, expert) pair by a few
rows of the expert's weight, and a program of the second one adds up all of a token's experts. Each pair reads 3 ·
hidden · width codes of half a byte. They are expanded in registers, two at a time, and multiplied on the ordinary
arithmetic units. While the first product runs, programs of the second one bring their codes to the GPU's cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.reference.experts import ExpertBiases
from quire.compute.kernels.reference.linear import CodebookWeight
from quire.compute.kernels.triton.experts.expert_gemms import constants_of, finished
from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.linear.coded_gemm import (
    code_values,
    has_bf16_pairs,
    is_mxfp4,
    micro_values,
    scale_values,
)
from quire.compute.kernels.triton.linear.gemv import GemvConfig
from quire.compute.kernels.triton.linear.inner_loops import fetch_ahead, weight_rows


def serves_by_pair(weight: object) -> bool:
    """Whether these kernels serve the form of a weight."""
    return isinstance(weight, CodebookWeight) and is_mxfp4(weight)


def mxfp4_by_pair(
    x: Tensor,
    gate_up: CodebookWeight,
    down: CodebookWeight,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    configs: tuple[GemvConfig, GemvConfig],
    overlap: bool,
    partial: bool = False,
    activation: Activation = SILU,
    biases: ExpertBiases | None = None,
) -> None:
    """Compute the op `experts`; arguments as in `gemv_by_pair`, without adapters."""
    (tokens, hidden), chosen, count = x.shape, numbers.shape[1], len(down.packed)
    width, (first, second) = down.columns, configs
    quick = x.dtype == torch.bfloat16 and has_bf16_pairs(x.device)
    of_gate_up, of_down = biases or (None, None)
    middle = torch.empty((tokens * chosen, width), dtype=x.dtype, device=x.device)
    _pair_kernel[(cdiv(width, first.block_n // 2) * tokens * chosen,)](
        x, gate_up.packed, gate_up.scales.view(torch.uint8), of_gate_up, numbers, middle, tokens * chosen, width, count,
        CHOSEN=chosen, **constants_of(activation), COLUMNS=hidden, BLOCK_N=first.block_n, BLOCK_K=first.block_k,
        PARTIAL=partial, QUICK=quick, OVERLAP=overlap, num_warps=first.warps, launch_pdl=overlap,
    )  # fmt: skip
    _token_kernel[(cdiv(hidden, second.block_n) * tokens,)](
        middle, down.packed, down.scales.view(torch.uint8), of_down, numbers, weights, out, tokens, hidden, count,
        CHOSEN=chosen, COLUMNS=width, BLOCK_N=second.block_n, BLOCK_K=second.block_k, PARTIAL=partial, QUICK=quick,
        OVERLAP=overlap, num_warps=second.warps, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["pairs", "experts"])
def _pair_kernel(
    x, codes, scales, biases, numbers, y, pairs, width, experts, CHOSEN: tl.constexpr, KIND: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTIAL: tl.constexpr, QUICK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write y [pairs, width], the activation of gates and ups."""
    MADE: tl.constexpr = BLOCK_N // 2
    pair = (tl.program_id(0) % pairs).to(tl.int64)
    begin = tl.program_id(0) // pairs * MADE
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)  # not before, so that the next kernel may read the experts' numbers without waiting
    expert = tl.load(numbers + pair).to(tl.int64)
    if not PARTIAL or expert < experts:
        rows = weight_rows(begin, width, BLOCK_N, True) + expert * (2 * width)
        sums = tl.zeros((BLOCK_N, BLOCK_K // 32, 16), tl.float32)
        own = x + pair // CHOSEN * COLUMNS
        values = _summed(_add_products(sums, own, codes, scales, rows, 1.0, COLUMNS, BLOCK_N, BLOCK_K, QUICK), QUICK)
        of_bias = None if biases is None else biases + expert * 2 * width
        one = pair + tl.arange(0, 1)
        values = finished(
            values[None, :], y, y, y, of_bias, one, one >= 0, begin, width,
            1, MADE, 1, CHOSEN, True, False, KIND, ALPHA, LIMIT,
        )  # fmt: skip
        n = begin + tl.arange(0, MADE)
        tl.store(y + pair * width + n, tl.reshape(values, (MADE,)).to(y.dtype.element_ty), n < width)


@fast_launch
@triton.jit(do_not_specialize=["tokens", "experts"])
def _token_kernel(
    x, codes, scales, biases, numbers, weights, y, tokens, hidden, experts, CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTIAL: tl.constexpr, QUICK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write y [tokens, hidden]: the weighted sum of each token's experts on its rows of x [pairs, COLUMNS]."""
    release_dependents(OVERLAP)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    begin = tl.program_id(0) // tokens * BLOCK_N
    rows = weight_rows(begin, hidden, BLOCK_N, False)
    if OVERLAP and not PARTIAL:  # which of the experts is the first one here is not known before
        for choice in tl.static_range(CHOSEN):
            ahead = tl.load(numbers + token * CHOSEN + choice, cache_modifier=".cg").to(tl.int64)
            fetch_ahead(codes + ahead * hidden * (COLUMNS // 2), rows * (COLUMNS // 2), 0, COLUMNS // 2, BLOCK_N, 1024)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_N, BLOCK_K // 32, 16), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        expert = tl.load(numbers + pair, cache_modifier=".cg").to(tl.int64)
        if not PARTIAL or expert < experts:
            weight = tl.load(weights + pair, cache_modifier=".cg").to(tl.float32)
            own = rows + expert * hidden
            if biases is not None:
                total += weight * tl.load(biases + own).to(tl.float32)
            sums = _add_products(sums, x + pair * COLUMNS, codes, scales, own, weight, COLUMNS, BLOCK_N, BLOCK_K, QUICK)
    total += _summed(sums, QUICK)
    n = begin + tl.arange(0, BLOCK_N)
    tl.store(y + token * hidden + n, total.to(y.dtype.element_ty), n < hidden)


@triton.jit
def _add_products(
    sums, x, codes, scales, rows, factor, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    QUICK: tl.constexpr,
):  # fmt: skip
    """Return sums [BLOCK_N, runs, 16] plus the products of x [COLUMNS] and rows of a weight, times the factor.

    Each part of the codes is requested before the previous one is used. If QUICK, products are 2^-63 times as large.
    """
    GROUPS: tl.constexpr = COLUMNS // 32
    run, place = tl.arange(0, BLOCK_K // 32), tl.arange(0, 16)
    code_at = codes + (rows * (COLUMNS // 2))[:, None, None] + (run * 16)[None, :, None] + place[None, None, :]
    scale_at = scales + (rows * GROUPS)[:, None] + run[None, :]
    x_at = x + (run * 32)[:, None] + place[None, :]
    ahead = tl.load(code_at, (run < GROUPS)[None, :, None], 0, eviction_policy="evict_first")
    scales_ahead = tl.load(scale_at, (run < GROUPS)[None, :], 0)
    for begin in tl.static_range(0, COLUMNS, BLOCK_K):
        stored, exponents = ahead, scales_ahead
        there = run < GROUPS - begin // 32
        if begin + BLOCK_K < COLUMNS:
            next_there = run < GROUPS - (begin + BLOCK_K) // 32
            next_at = code_at + (begin + BLOCK_K) // 2
            ahead = tl.load(next_at, next_there[None, :, None], 0, eviction_policy="evict_first")
            scales_ahead = tl.load(scale_at + (begin + BLOCK_K) // 32, next_there[None, :], 0)
        a = tl.load(x_at + begin, there[:, None], 0.0).to(tl.float32) * factor
        b = tl.load(x_at + begin + 16, there[:, None], 0.0).to(tl.float32) * factor
        if QUICK:
            low, high = micro_values(stored, exponents[:, :, None])
            low, high = low.to(tl.float32), high.to(tl.float32)
        else:
            scale = scale_values(exponents, True)[:, :, None]
            low = code_values(stored & 15, None, "e2m1") * scale
            high = code_values(stored >> 4, None, "e2m1") * scale
        sums += low * a[None, :, :] + high * b[None, :, :]
    return sums


@triton.jit
def _summed(sums, QUICK: tl.constexpr):
    """Return [BLOCK_N], the sums of rows."""
    total = tl.sum(tl.sum(sums, 2), 1)
    if QUICK:
        total *= 9223372036854775808.0
    return total
