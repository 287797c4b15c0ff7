"""Computes y = x Wᵀ for 1 to 16 rows of x and a packed weight of 4-bit codes, expanded to bf16 or fp16 in registers.

The kernel reads rows · columns / 2 bytes of codes, and scales. Only sums go through shared memory, at the end: a thread
reads its part of the tensor core's operand directly from the packed layout (packed_layout.py). The warps of a program
take different columns of the same rows. The weight is requested one or two steps ahead, its first part before x is
complete. x, which comes from the cache, is requested one step ahead: waiting for it at each step would cost as much as
reading the weight. Its columns are loaded in pairs, as words, which loops carry unchanged from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.linear.packed_gemm import along_first, along_second, along_third, middle_zeros
from quire.compute.kernels.triton.linear.packed_layout import PackedWeight, expansion, pairs_of

_EXPAND_BF16 = gl.constexpr(expansion(torch.bfloat16, scaled=False))
_EXPAND_FP16 = gl.constexpr(expansion(torch.float16, scaled=False))
_SPLIT = gl.constexpr("mov.b32 $0, $2; mov.b32 $1, $3;")
"""Puts two words of pairs into a register each."""


@dataclass(frozen=True)
class PackedGemvConfig:
    """How the work is divided.

    Attributes:
        block_m: Rows of x of a tile, 8 or 16.
        groups: Groups of 128 columns that a warp multiplies in a step.
        warps: Warps of a program, each with columns of its own.
        tiles: Tiles of 16 rows of the weight of a program.
        depth: Steps by which the weight is requested ahead: 1 or 2.
        x_ahead: x is requested one step ahead, in registers of its own.
    """

    block_m: int
    groups: int
    warps: int
    tiles: int
    depth: int = 1
    x_ahead: bool = True


def packed_gemv(x: Tensor, weight: PackedWeight, y: Tensor, config: PackedGemvConfig, overlap: bool) -> None:
    """Write x Wᵀ to y, or silu of its first half times the second if the weight is gated.

    Args:
        x: [rows, columns] in the dtype of the weight's scales, at most block_m rows.
        y: [rows, outputs] in the dtype of x, contiguous; half as many outputs where the weight is gated.
        config: Its tiles divide the weight's.
        overlap: As in dependent_launch.
    """
    assert x.shape[0] <= config.block_m
    assert weight.rows % (16 * config.tiles) == 0
    pairs = pairs_of(x)
    groups = weight.columns // 128
    steps = cdiv(groups, config.warps * config.groups)
    _packed_gemv_kernel[(weight.rows // 16 // config.tiles,)](
        pairs, weight.words, weight.scales,
        weight.words if weight.zeros is None else weight.zeros.view(torch.int32), y,
        x.shape[0], pairs.stride(0), y.shape[1],
        GROUPS=groups, M=config.block_m, C=config.groups, W=config.warps, R=config.tiles,
        D=min(config.depth, steps), X_AHEAD=config.x_ahead, SYMMETRIC=weight.zeros is None, GATED=weight.gated,
        OVERLAP=overlap,
        num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@gluon.jit(do_not_specialize=["rows"])
def _packed_gemv_kernel(
    x, w, scales, zeros, y, rows, x_stride, outputs,
    GROUPS: gl.constexpr, M: gl.constexpr, C: gl.constexpr, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr,
    X_AHEAD: gl.constexpr, SYMMETRIC: gl.constexpr, GATED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    flat: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [W, 1, 1], [2, 1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [W, 1, 1], [2, 1, 0])
    dtype: gl.constexpr = y.dtype.element_ty
    release_dependents(OVERLAP)
    tile = gl.program_id(0) * R
    STEPS: gl.constexpr = (GROUPS + W * C - 1) // (W * C) * C  # of each warp, in groups
    EVEN: gl.constexpr = STEPS * W == GROUPS
    warp = along_first(W, flat)
    r = along_second(R, flat)
    word = along_third(256, flat)
    w_from = w + (tile + r).to(gl.int64) * (GROUPS * 256) + (warp * (STEPS * 256) + word)
    z_from = zeros + ((tile + r) * GROUPS + warp * STEPS) * 8 + word // 16 % 8
    x_warp = along_first(W, wide)
    m = along_second(M, wide)
    x_from = x + m.to(gl.int64) * x_stride + (x_warp * (STEPS * 64) + along_third(64, wide))
    x_mask = m < rows
    s_warp = gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma))), 1)
    s_row = gl.expand_dims(gl.arange(0, 16 * R, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma))), 0)
    s_place = (tile + s_row // 16) * (GROUPS * 16) + s_row % 8 * 2 + s_row // 8 % 2
    s_from = scales + s_place + s_warp * (STEPS * 16)
    acc = gl.zeros([W, 16 * R, M], gl.float32, mma)
    sources = (w_from, s_from, z_from, warp, s_warp)
    first = _load_weight(sources, 0, STEPS, GROUPS, C, SYMMETRIC, EVEN)
    second = first
    if D == 2:
        second = _load_weight(sources, C, STEPS, GROUPS, C, SYMMETRIC, EVEN)
    wait_for_inputs(OVERLAP)
    xs = _load_x(x_from, x_mask, x_warp, 0, STEPS, GROUPS, C, EVEN)
    if STEPS > D * C:
        for begin in range(0, STEPS - D * C, C):
            now = first
            ahead = _load_weight(sources, begin + D * C, STEPS, GROUPS, C, SYMMETRIC, EVEN)
            if D == 2:
                first = second
                second = ahead
            else:
                first = ahead
            here = xs
            if X_AHEAD:
                xs = _load_x(x_from, x_mask, x_warp, begin + C, STEPS, GROUPS, C, EVEN)
            acc = _multiply(now, here, acc, C, W, R, M, SYMMETRIC, dtype, flat, mma)
            if not X_AHEAD:
                xs = _load_x(x_from, x_mask, x_warp, begin + C, STEPS, GROUPS, C, EVEN)
    if D == 2:
        here = xs
        xs = _load_x(x_from, x_mask, x_warp, STEPS - C, STEPS, GROUPS, C, EVEN)
        acc = _multiply(first, here, acc, C, W, R, M, SYMMETRIC, dtype, flat, mma)
        first = second
    acc = _multiply(first, xs, acc, C, W, R, M, SYMMETRIC, dtype, flat, mma)
    _write(gl.sum(acc, 0), y, tile, rows, outputs, M, W, R, GATED)


@gluon.jit
def _load_weight(
    sources, begin, STEPS: gl.constexpr, GROUPS: gl.constexpr, C: gl.constexpr,
    SYMMETRIC: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Return words, scales and pairs of zeros of C groups of each warp; scales are 0 behind the last group."""
    w_from, s_from, z_from, warp, s_warp = sources
    words = ()
    factors = ()
    offsets = ()
    for i in gl.static_range(C):
        local = begin + i
        there = warp * STEPS + local < GROUPS
        words += (_load(w_from + local * 256, there, 0, EVEN),)  # type: ignore[assignment]
        factors += (_load(s_from + local * 16, s_warp * STEPS + local < GROUPS, 0.0, EVEN),)  # type: ignore[assignment]
        if not SYMMETRIC:
            offsets += (_load(z_from + local * 8, there, 0, EVEN),)  # type: ignore[assignment]
    return words, factors, offsets


@gluon.jit
def _load(pointers, inside, other, EVEN: gl.constexpr):
    if EVEN:
        return gl.load(pointers, eviction_policy="evict_first")
    return gl.load(pointers, mask=inside, other=other, eviction_policy="evict_first")


@gluon.jit
def _load_x(
    x_from, x_mask, x_warp, begin, STEPS: gl.constexpr, GROUPS: gl.constexpr, C: gl.constexpr, EVEN: gl.constexpr
):
    """Return pairs of columns of C groups of each warp, [W, M, 64] int32 each."""
    xs = ()
    for i in gl.static_range(C):
        mask = x_mask
        if not EVEN:
            mask = x_mask & (x_warp * STEPS + begin + i < GROUPS)
        xs += (gl.load(x_from + (begin + i) * 64, mask=mask, other=0),)  # type: ignore[assignment]
    return xs


@gluon.jit
def _halves(words, W: gl.constexpr, M: gl.constexpr, dtype: gl.constexpr):
    """Return [W, M, 128], the values of pairs [W, M, 64]."""
    if dtype == gl.float16:
        even, odd = gl.inline_asm_elementwise(
            _SPLIT, "=r,=r,r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            _SPLIT, "=r,=r,r,r", [words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    both = gl.reshape(gl.join(even, odd), [W, M, 32, 2, 2])  # two words, half, which word
    return gl.reshape(gl.permute(both, (0, 1, 2, 4, 3)), [W, M, 128])


@gluon.jit
def _multiply(
    weight, xs, acc, C: gl.constexpr, W: gl.constexpr, R: gl.constexpr, M: gl.constexpr, SYMMETRIC: gl.constexpr,
    dtype: gl.constexpr, flat: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    words, factors, offsets = weight
    for i in gl.static_range(C):
        b = gl.reshape(_halves(xs[i], W, M, dtype), [W, M, 4, 4, 2, 2, 2])  # warp, row, half and ehi, l, s, c, e
        b = gl.reshape(gl.permute(b, (0, 2, 4, 5, 3, 6, 1)), [W, 128, M])
        b = gl.convert_layout(b, gl.DotOperandLayout(1, mma, 2))
        if SYMMETRIC:
            low = middle_zeros([W, R, 256], dtype, flat)
            high = low
        else:
            low = (offsets[i] & 0xFFFF) * 0x10001
            high = ((offsets[i] >> 16) & 0xFFFF) * 0x10001
        a = _expand(words[i], low, high, W, R, dtype, gl.DotOperandLayout(0, mma, 2))
        part = mma_v2(a, b, gl.zeros([W, 16 * R, M], gl.float32, mma))
        acc += part * gl.expand_dims(factors[i].to(gl.float32), 2)
    return acc


@gluon.jit
def _expand(words, low, high, W: gl.constexpr, R: gl.constexpr, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Return code - zero, [W, 16 R, 128], of words [W, R, 256]; low and high are zeros of the first and last eight
    rows."""
    o = _codes_less_zeros(words, low, high, dtype)
    first = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))  # [..., h, c]
    second = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    both = gl.join(first, second)  # [W, R, 256, h, c, s]
    parts = gl.reshape(both, [W, R, 2, 8, 4, 2, 2, 2, 2, 2])  # W, R, half, 8 rows, l, ehi, e, h, c, s
    parts = gl.permute(parts, (0, 1, 7, 3, 2, 5, 9, 8, 4, 6))  # W R h 8 | half ehi s c l e
    return gl.convert_layout(gl.reshape(parts, [W, 16 * R, 128]), LAYOUT)


@gluon.jit
def _codes_less_zeros(words, low, high, dtype: gl.constexpr):
    """Return code - zero of each word's codes, eight tensors of the shape of `words`."""
    if dtype == gl.float16:
        made = gl.inline_asm_elementwise(
            _EXPAND_FP16, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r", [words, low, high],
            dtype=(gl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        made = gl.inline_asm_elementwise(
            _EXPAND_BF16, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r", [words, low, high],
            dtype=(gl.bfloat16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    return made


@gluon.jit
def _write(sums, y, tile, rows, outputs, M: gl.constexpr, W: gl.constexpr, R: gl.constexpr, GATED: gl.constexpr):
    """Write y [rows, outputs] from sums [16 R, M]."""
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(sums, [R, 2, 8, M]), (0, 2, 3, 1)))
        made = gl.reshape(gate * up / (1.0 + gl.exp2(gate * -1.4426950408889634)), [8 * R, M])
        plain: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, W], [0, 1])
        made = gl.convert_layout(made, plain)
        n = tile * 8 + gl.arange(0, 8 * R, layout=gl.SliceLayout(1, plain))
        m = gl.arange(0, M, layout=gl.SliceLayout(0, plain))
        inside = (m < rows)[None, :] & (n < outputs)[:, None]
        gl.store(y + m[None, :].to(gl.int64) * outputs + n[:, None], made.to(y.dtype.element_ty), inside)
    else:
        flat: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, W], [0, 1])
        made = gl.convert_layout(sums, flat)
        n = tile * 16 + gl.arange(0, 16 * R, layout=gl.SliceLayout(1, flat))
        m = gl.arange(0, M, layout=gl.SliceLayout(0, flat))
        inside = (m < rows)[None, :] & (n < outputs)[:, None]
        gl.store(y + m[None, :].to(gl.int64) * outputs + n[:, None], made.to(y.dtype.element_ty), inside)
