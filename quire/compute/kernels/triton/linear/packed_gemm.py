"""Computes y = x Wᵀ for tens of rows of x and a packed weight of 4-bit codes, on Hopper's matrix units.

Codes become x's dtype, bf16 or fp16, in registers, from which `wgmma` takes its first operand, while the copy engine
brings x to shared memory. Each warpgroup has four tiles of 16 rows of the weight; x has its columns in the tensor
core's order (`permute_columns`). While one step is multiplied, the codes of the next step are expanded. Splits of the
columns are added as in gemm.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, tensor_descriptor
from quire.compute.kernels.triton.linear.gemm import scratch_of_tiles
from quire.compute.kernels.triton.linear.packed_layout import PackedWeight, expansion

ask_for_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name before Triton 3.9
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # the name before Triton 3.7

_EXPAND_BF16 = gl.constexpr(expansion(torch.bfloat16, scaled=True))
_EXPAND_FP16 = gl.constexpr(expansion(torch.float16, scaled=True))


@dataclass(frozen=True)
class PackedGemmConfig:
    """How the work is divided.

    Attributes:
        block_m: Rows of x of a tile.
        warpgroups: Warpgroups of a program, each with 64 rows of the weight.
        stages: Steps of 128 columns under way at the same time.
        splits: Parts of the columns.
    """

    block_m: int
    warpgroups: int
    stages: int
    splits: int


def packed_gemm(x: Tensor, weight: PackedWeight, y: Tensor, config: PackedGemmConfig, overlap: bool) -> None:
    """Write x Wᵀ to y, or silu of its first half times the second if the weight is gated.

    Args:
        x: [rows, columns] in the dtype of the weight's scales, from `permute_columns`.
        weight: 64 · warpgroups divides its rows.
        y: [rows, outputs] in the dtype of x, contiguous; half as many outputs where the weight is gated.
        overlap: As in dependent_launch.
    """
    rows, m, t = x.shape[0], config.block_m, config.warpgroups
    assert weight.rows % (64 * t) == 0
    tiles = weight.rows // (64 * t) * cdiv(rows, m)
    sums, arrived = scratch_of_tiles(y, tiles, config.splits, 64 * t * m)
    scales = weight.scales.view(torch.int32)
    _packed_gemm_kernel[(tiles, config.splits)](
        tensor_descriptor(x, tuple(x.shape), (x.stride(0), 1), (m, 128), layout_of_x()),
        weight.words, scales, scales if weight.zeros is None else weight.zeros.view(torch.int32), y, sums, arrived,
        rows, y.shape[1], weight.columns // 128,
        M=m, T=t, STAGES=config.stages, SPLIT=config.splits > 1, SYMMETRIC=weight.zeros is None, GATED=weight.gated,
        OVERLAP=overlap, num_warps=4 * t, launch_pdl=overlap,
    )  # fmt: skip


@functools.cache
def layout_of_x() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@fast_launch
@gluon.jit(do_not_specialize=["rows", "GROUPS"])
def _packed_gemm_kernel(
    x, w, scales, zeros, y, sums, arrived, rows, outputs, GROUPS,
    M: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    SYMMETRIC: gl.constexpr, GATED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * T, 1], [16, M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    dtype: gl.constexpr = y.dtype.element_ty
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [T, 4], [1, 0])
    release_dependents(OVERLAP)
    tile, n_tile, m_begin, first, last = place_of_program(rows, GROUPS, T, M, SPLIT)
    w_memory = gl.allocate_shared_memory(gl.int32, [STAGES, T, 1024], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    x_memory = gl.allocate_shared_memory(x.dtype, [STAGES, M, 128], x.layout)
    t_index = gl.arange(0, T, layout=gl.SliceLayout(1, flat))[:, None]
    index = gl.arange(0, 1024, layout=gl.SliceLayout(0, flat))[None, :]
    # the number of a word's bits: half, warp (2), row of eight (3), l (2), ehi, e
    of_16 = (n_tile + t_index) * 4 + index // 128 % 4
    w_from = w + (of_16.to(gl.int64) * GROUPS + first) * 256 + (index // 512 * 128 + index % 128)
    pair = (of_16 * GROUPS) * 8 + index // 16 % 8
    for early in gl.static_range(STAGES - 1):
        copy_async(w_memory.index(early), w_from + early * 256, mask=(index < 1024) & (first + early < last))
        async_copy.commit_group()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(STAGES):
        mbarrier.init(ready.index(number), count=1)
    fence_async_shared()
    barrier()
    wait_for_inputs(OVERLAP)
    for early in gl.static_range(STAGES - 1):
        _ask_for_x(x, m_begin, first + early, early, ready, x_memory, M, first + early < last)
    acc = gl.zeros([64 * T, M], gl.float32, mma)
    s, z = _load_pairs(scales, zeros, pair, first, GROUPS, T, SYMMETRIC, dtype, flat)
    async_copy.wait_group(STAGES - 2)
    a = _expand(w_memory.index(0).load(flat), s, z, T, dtype, operand)
    s, z = _load_pairs(scales, zeros, pair, first + 1, GROUPS, T, SYMMETRIC, dtype, flat)
    for group in range(first, last):
        step = group - first
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        under_way = warpgroup_mma(a, x_memory.index(stage).permute((1, 0)), acc, is_async=True)
        async_copy.wait_group(STAGES - 3)
        a = _expand(w_memory.index((step + 1) % STAGES).load(flat), s, z, T, dtype, operand)  # the last one is not used
        s, z = _load_pairs(scales, zeros, pair, group + 2, GROUPS, T, SYMMETRIC, dtype, flat)
        acc = warpgroup_mma_wait(0, (under_way,))
        barrier()
        ahead = (step + STAGES - 1) % STAGES
        more = group + STAGES - 1 < last
        _ask_for_x(x, m_begin, group + STAGES - 1, ahead, ready, x_memory, M, more)
        copy_async(w_memory.index(ahead), w_from + (step + STAGES - 1) * 256, mask=(index < 1024) & more)
        async_copy.commit_group()
    finish_tile(acc, y, sums, arrived, tile, n_tile, m_begin, rows, outputs, T, M, SPLIT, GATED, mma)


@gluon.jit
def _ask_for_x(x, m_begin, group, stage, ready, x_memory, M: gl.constexpr, pred):
    mbarrier.expect(ready.index(stage), M * 256, pred=pred)
    ask_for_tile(x, [m_begin, group * 128], ready.index(stage), x_memory.index(stage), pred=pred)


@gluon.jit
def _load_pairs(
    scales, zeros, pair, group, GROUPS, T: gl.constexpr, SYMMETRIC: gl.constexpr, dtype: gl.constexpr,
    flat: gl.constexpr,
):  # fmt: skip
    """Return a group's scales and zeros as pairs of rows 8 apart, [T, 1024]; past the last group, the last one's."""
    place = pair + gl.minimum(group, GROUPS - 1) * 8
    s = gl.load(scales + place)
    if SYMMETRIC:
        z = middle_zeros([T, 1024], dtype, flat)
    else:
        z = gl.load(zeros + place)
    return s, z


@gluon.jit
def _expand(words, scales, zeros, T: gl.constexpr, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Return (code - zero) · scale, [64 T, 128], of words [T, 1024]."""
    o = expanded_codes(words, scales, zeros, dtype)
    first = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))  # [..., h, c]
    second = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    both = gl.join(first, second)  # [T, 1024, h, c, s]
    parts = gl.reshape(both, [T, 2, 4, 8, 4, 2, 2, 2, 2, 2])  # T, half, warp, 8 rows, l, ehi, e, h, c, s
    parts = gl.permute(parts, (0, 2, 7, 3, 1, 5, 9, 8, 4, 6))  # T warp h 8 | half ehi s c l e
    return gl.convert_layout(gl.reshape(parts, [64 * T, 128]), LAYOUT)


@gluon.jit
def expanded_codes(words, scales, zeros, dtype: gl.constexpr):
    """Return (code - zero) · scale of each word's codes, eight tensors of the shape of `words`."""
    if dtype == gl.float16:
        made = gl.inline_asm_elementwise(
            _EXPAND_FP16, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r", [words, scales, zeros],
            dtype=(gl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        made = gl.inline_asm_elementwise(
            _EXPAND_BF16, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r", [words, scales, zeros],
            dtype=(gl.bfloat16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    return made


@gluon.jit
def middle_zeros(SHAPE: gl.constexpr, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Return words of two zeros of 8, as `PackedWeight` has them."""
    if dtype == gl.float16:
        made = gl.full(SHAPE, 0x64086408, gl.int32, LAYOUT)
    else:
        made = gl.full(SHAPE, 0x43084308, gl.int32, LAYOUT)
    return made


@gluon.jit
def along_first(SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return 0 to SIZE along the first of three dimensions."""
    index = gl.arange(0, SIZE, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(index, 1), 2)


@gluon.jit
def along_second(SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return 0 to SIZE along the second of three dimensions."""
    index = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(index, 0), 2)


@gluon.jit
def along_third(SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return 0 to SIZE along the third of three dimensions."""
    index = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(index, 0), 1)


@gluon.jit
def place_of_program(rows, GROUPS, T: gl.constexpr, M: gl.constexpr, SPLIT: gl.constexpr):
    """Return a program's tile, its first 64 rows of the weight, its first row of x, and its groups of columns."""
    tile = gl.program_id(0)
    down = gl.cdiv(rows, M)
    first = 0
    last = GROUPS
    if SPLIT:
        first = gl.program_id(1) * GROUPS // gl.num_programs(1)
        last = (gl.program_id(1) + 1) * GROUPS // gl.num_programs(1)
    return tile, tile // down * T, tile % down * M, first, last


@gluon.jit
def finish_tile(
    acc, y, sums, arrived, tile, n_tile, m_begin, rows, outputs, T: gl.constexpr, M: gl.constexpr, SPLIT: gl.constexpr,
    GATED: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Write a tile of y from its sums [64 T, M]; where a tile is SPLIT, its last program adds up all splits first."""
    if SPLIT:
        SIZE: gl.constexpr = 64 * T * M
        n = gl.arange(0, 64 * T, layout=gl.SliceLayout(1, mma))
        m = gl.arange(0, M, layout=gl.SliceLayout(0, mma))
        place = n[:, None] * M + m[None, :]
        splits = gl.num_programs(1)
        own = sums + tile.to(gl.int64) * splits * SIZE
        gl.store(own + gl.program_id(1) * SIZE + place, acc)
        barrier()  # every thread's part is written before one of them says so
        if gl.atomic_add(arrived + tile, 1) == splits - 1:
            gl.store(arrived + tile, 0)
            acc = gl.load(own + place, cache_modifier=".cg")
            for other in range(1, splits):
                acc += gl.load(own + other * SIZE + place, cache_modifier=".cg")
            _write_tile(acc, y, n_tile, m_begin, rows, outputs, T, M, GATED, mma)
    else:
        _write_tile(acc, y, n_tile, m_begin, rows, outputs, T, M, GATED, mma)


@gluon.jit
def _write_tile(
    acc, y, n_tile, m_begin, rows, outputs, T: gl.constexpr, M: gl.constexpr, GATED: gl.constexpr, mma: gl.constexpr
):
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(acc, [4 * T, 2, 8, M]), (0, 2, 3, 1)))
        made = gl.reshape(gate * up / (1.0 + gl.exp2(gate * -1.4426950408889634)), [32 * T, M])
        flat: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4 * T, 1], [1, 0])
        made = gl.convert_layout(made, flat)
        n = n_tile * 32 + gl.arange(0, 32 * T, layout=gl.SliceLayout(1, flat))
        m = m_begin + gl.arange(0, M, layout=gl.SliceLayout(0, flat))
        inside = (m < rows)[None, :] & (n < outputs)[:, None]
        gl.store(y + m[None, :].to(gl.int64) * outputs + n[:, None], made.to(y.dtype.element_ty), inside)
    else:
        n = n_tile * 64 + gl.arange(0, 64 * T, layout=gl.SliceLayout(1, mma))
        m = m_begin + gl.arange(0, M, layout=gl.SliceLayout(0, mma))
        inside = (m < rows)[None, :] & (n < outputs)[:, None]
        gl.store(y + m[None, :].to(gl.int64) * outputs + n[:, None], acc.to(y.dtype.element_ty), inside)
