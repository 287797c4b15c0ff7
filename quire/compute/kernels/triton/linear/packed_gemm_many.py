"""Computes y = x Wᵀ for hundreds of rows of x and a packed weight of 4-bit codes.

It works as packed_gemm.py does, but expands half a step while it multiplies the other half. The assembler lets nothing
run between a product and the wait behind it, so one product is always under way, not waited for, while codes for the
next product are expanded. Words come straight to registers, `ahead` steps ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, tensor_descriptor
from quire.compute.kernels.triton.linear.gemm import scratch_of_tiles
from quire.compute.kernels.triton.linear.packed_gemm import (
    ask_for_tile,
    barrier,
    expanded_codes,
    finish_tile,
    layout_of_x,
    middle_zeros,
    place_of_program,
)
from quire.compute.kernels.triton.linear.packed_layout import PackedWeight


@dataclass(frozen=True)
class PackedGemmManyConfig:
    """How the work is divided.

    Attributes:
        block_m: Rows of x of a tile.
        warpgroups: Warpgroups of a program, each with 64 rows of the weight.
        ahead: Steps of 128 columns by which words are requested before they are expanded.
        splits: Parts of the columns.
        ring: Steps of x in shared memory, divided by `ahead`.
    """

    block_m: int
    warpgroups: int
    ahead: int
    splits: int
    ring: int


def packed_gemm_many(x: Tensor, weight: PackedWeight, y: Tensor, config: PackedGemmManyConfig, overlap: bool) -> None:
    """Compute `packed_gemm`, with its arguments."""
    rows, m, t = x.shape[0], config.block_m, config.warpgroups
    assert weight.rows % (64 * t) == 0
    tiles = weight.rows // (64 * t) * cdiv(rows, m)
    sums, arrived = scratch_of_tiles(y, tiles, config.splits, 64 * t * m)
    scales = weight.scales.view(torch.int32)
    _packed_gemm_many_kernel[(tiles, config.splits)](
        tensor_descriptor(x, tuple(x.shape), (x.stride(0), 1), (m, 64), layout_of_x()),
        weight.words, scales, scales if weight.zeros is None else weight.zeros.view(torch.int32), y, sums, arrived,
        rows, y.shape[1], weight.columns // 128,
        M=m, T=t, U=config.ahead, B=config.ring, SPLIT=config.splits > 1, SYMMETRIC=weight.zeros is None,
        GATED=weight.gated, OVERLAP=overlap, num_warps=4 * t, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@gluon.jit(do_not_specialize=["rows", "GROUPS"])
def _packed_gemm_many_kernel(
    x, w, scales, zeros, y, sums, arrived, rows, outputs, GROUPS,
    M: gl.constexpr, T: gl.constexpr, U: gl.constexpr, B: gl.constexpr, SPLIT: gl.constexpr,
    SYMMETRIC: gl.constexpr, GATED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * T, 1], [16, M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    dtype: gl.constexpr = y.dtype.element_ty
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [T, 4], [1, 0])
    RING: gl.constexpr = B * U
    release_dependents(OVERLAP)
    tile, n_tile, m_begin, first, last = place_of_program(rows, GROUPS, T, M, SPLIT)
    steps = last - first
    blocks = gl.cdiv(steps, U)
    x_memory = gl.allocate_shared_memory(x.dtype, [2 * RING, M, 64], x.layout)
    t_index = gl.arange(0, T, layout=gl.SliceLayout(1, flat))[:, None]
    index = gl.arange(0, 512, layout=gl.SliceLayout(0, flat))[None, :]
    # the number of a word's bits: warp (2), row of eight (3), l (2), ehi, e
    of_16 = (n_tile + t_index) * 4 + index // 128
    w_from = w + (of_16.to(gl.int64) * GROUPS + first) * 256 + index % 128
    pair = (of_16 * GROUPS + first) * 8 + index // 16 % 8
    sources = (w_from, scales + pair, zeros + pair, pair * 0)
    now = _load_step(sources, 0, steps, T, SYMMETRIC, dtype, flat)
    queue = ()
    for u in gl.static_range(U):
        queue += (_load_step(sources, 1 + u, steps, T, SYMMETRIC, dtype, flat),)  # type: ignore[assignment]
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(RING):
        mbarrier.init(ready.index(number), count=1)
    fence_async_shared()
    barrier()
    wait_for_inputs(OVERLAP)
    for early in gl.static_range(RING):
        _ask_for_halves(x, m_begin, first + early, early, ready, x_memory, M, early < blocks * U)
    acc = gl.zeros([64 * T, M], gl.float32, mma)
    a = _expand_half(now[0], now[2], now[3], T, dtype, operand)
    part = 0
    before = 0
    phase = 0
    for block in range(blocks):
        for u in gl.static_range(U):
            stage = part * U + u
            mbarrier.wait(ready.index(stage), phase)
            under_way = warpgroup_mma(a, x_memory.index(2 * stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, (under_way,))  # all of the step before is done
            b = _expand_half(now[1], now[2], now[3], T, dtype, operand)
            if u == 0:
                barrier()
                for again in gl.static_range(U):
                    ahead = (block - 1 + B) * U + again
                    more = (block > 0) & (block - 1 + B < blocks)
                    _ask_for_halves(x, m_begin, first + ahead, before * U + again, ready, x_memory, M, more)
            under_way = warpgroup_mma(b, x_memory.index(2 * stage + 1).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, (under_way,))
            now = queue[0]  # type: ignore[misc]
            behind = _load_step(sources, block * U + u + 1 + U, steps, T, SYMMETRIC, dtype, flat)
            queue = queue[1:] + (behind,)  # type: ignore[assignment]  # noqa: RUF005
            a = _expand_half(now[0], now[2], now[3], T, dtype, operand)  # the last one is not used
        before = part
        part += 1
        phase = gl.where(part == B, phase ^ 1, phase)
        part = gl.where(part == B, 0, part)
    acc = warpgroup_mma_wait(0, (acc,))
    finish_tile(acc, y, sums, arrived, tile, n_tile, m_begin, rows, outputs, T, M, SPLIT, GATED, mma)


@gluon.jit
def _ask_for_halves(x, m_begin, group, stage, ready, x_memory, M: gl.constexpr, pred):
    mbarrier.expect(ready.index(stage), M * 256, pred=pred)
    ask_for_tile(x, [m_begin, group * 128], ready.index(stage), x_memory.index(2 * stage), pred=pred)
    ask_for_tile(x, [m_begin, group * 128 + 64], ready.index(stage), x_memory.index(2 * stage + 1), pred=pred)


@gluon.jit
def _load_step(sources, step, steps, T: gl.constexpr, SYMMETRIC: gl.constexpr, dtype: gl.constexpr, flat: gl.constexpr):
    """Return words of both halves, scales and zeros of a step; scales are 0 behind the last step."""
    w_from, s_from, z_from, none = sources
    there = none + step < steps
    low = gl.load(w_from + step * 256, mask=there, other=0, eviction_policy="evict_first")
    high = gl.load(w_from + (step * 256 + 128), mask=there, other=0, eviction_policy="evict_first")
    s = gl.load(s_from + step * 8, mask=there, other=0)
    if SYMMETRIC:
        z = middle_zeros([T, 512], dtype, flat)
    else:
        z = gl.load(z_from + step * 8, mask=there, other=0)
    return low, high, s, z


@gluon.jit
def _expand_half(words, scales, zeros, T: gl.constexpr, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Return (code - zero) · scale, [64 T, 64], of words [T, 512]."""
    o = expanded_codes(words, scales, zeros, dtype)
    first = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))  # [..., h, c]
    second = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    both = gl.join(first, second)  # [T, 512, h, c, s]
    parts = gl.reshape(both, [T, 4, 8, 4, 2, 2, 2, 2, 2])  # T, warp, 8 rows, l, ehi, e, h, c, s
    parts = gl.permute(parts, (0, 1, 6, 2, 4, 8, 7, 3, 5))  # T warp h 8 | ehi s c l e
    return gl.convert_layout(gl.reshape(parts, [64 * T, 64]), LAYOUT)
