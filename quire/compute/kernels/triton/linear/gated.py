"""Computes silu(x Gᵀ) · (x Uᵀ) for many rows of x on Hopper in one kernel; the weight has gates G above ups U.

The kernel is bound by its 4 · rows · outputs · columns operations. It moves x, the weight and its result once each
where the cache keeps what tiles share; a product followed by a kernel for the gate also writes and reads 2 · outputs
values a row.

A program has two kinds of warps (CUTLASS 3 calls the scheme warp-specialized, persistent and cooperative). One warp
requests tiles of x and the weight from the copy engine, some steps ahead. Two groups of four warps own 64 rows of x
each; both multiply the same 256 rows of the weight, so a step of 64 columns brings 48 KB for 2 · 128 · 256 · 64
operations. Programs stay on the GPU and take one tile after the other; a tile's data are read while the previous tile
is written.

The copy engine alternates eight rows of gates with the same eight rows of ups, so that the gate and up of an output
meet in one thread's registers, as sums in fp32. 8-bit operands have 128 columns a step; their scales multiply these
sums.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.device_properties import multiprocessors
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, tensor_descriptor

ask_for_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name before Triton 3.9
send_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

_GROUPS = gl.constexpr(2)
_ROWS = gl.constexpr(64)
"""Rows of x that a group of four warps owns."""
_BLOCK = gl.constexpr(256)
"""Rows of the weight in a tile, half of which are gates."""
_BYTES = gl.constexpr(128)
"""Bytes of a row in a step, as the copy engine lays them out for the matrix units."""
_STAGES = gl.constexpr(4)
"""Steps under way at the same time."""
_BAND = gl.constexpr(16)
"""Tiles of rows that run side by side, so that they share rows in the GPU's cache."""
_MOST = gl.constexpr(240)
"""Registers of a thread that multiplies, which takes them from the threads that copy."""
_REGISTERS = 168
"""Registers of a thread at the start; 384 threads with this many fill a multiprocessor."""
_DTYPES = (torch.bfloat16, torch.float16)


def supports_gated_gemm(x: Tensor, w: Tensor, y: Tensor) -> bool:
    """Whether `gated_gemm` takes these operands on sm_90: 16-bit floats, or e4m3 codes x and w, and a 16-bit y.

    The copy engine needs them to be aligned to 16 bytes.
    """
    (outputs, columns), item = (w.shape[0] // 2, w.shape[1]), x.element_size()
    is_coded = x.dtype == torch.float8_e4m3fn
    return (
        x.dtype == w.dtype
        and y.dtype in _DTYPES
        and (is_coded or x.dtype == y.dtype)
        and x.stride(1) == y.stride(1) == 1
        and w.is_contiguous()
        and outputs % 8 == columns * item % 16 == x.stride(0) * item % 16 == y.stride(0) % 8 == 0
        and x.data_ptr() % 16 == w.data_ptr() % 16 == y.data_ptr() % 16 == 0
    )


def gated_gemm(x: Tensor, w: Tensor, y: Tensor, overlap: bool, scales: tuple[Tensor, Tensor] | None = None) -> None:
    """Write silu of the first half of x Wᵀ times the second to y. Rows of x and y may lie apart.

    Args:
        x: [rows, columns].
        w: [2 · outputs, columns].
        y: [rows, outputs].
        overlap: As in dependent_launch.
        scales: The scales [rows, 1] and [2 · outputs, 1] fp32 of x and w, if these are codes.
    """
    rows, outputs = y.shape
    down, across = cdiv(rows, 128), cdiv(outputs, 128)
    columns = 128 // x.element_size()
    x_scales, w_scales = scales or (y, y)  # y is not touched as scales
    _gated_gemm_kernel[(min(down * across, multiprocessors(x.device)),)](
        _tensor_descriptor(x, 64, columns), _weight_descriptor(w, columns), _tensor_descriptor(y, 64, 128), x_scales,
        w_scales, rows, outputs, cdiv(x.shape[1], columns), down, across,
        COLUMNS=columns, SCALED=scales is not None, OVERLAP=overlap, num_warps=4, maxnreg=_REGISTERS,
        launch_pdl=overlap,
    )  # fmt: skip


def _tensor_descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe x to the copy engine, which takes tiles [rows, columns] of it."""
    return tensor_descriptor(x, tuple(x.shape), (x.stride(0), 1), (rows, columns), _layout(2, 8 * x.element_size()))


def _weight_descriptor(w: Tensor, columns: int) -> TensorDescriptor:
    """Describe w as [eights of rows, gate or up, 8, columns]: eight rows of gates come before the same eight of ups."""
    outputs, width = w.shape[0] // 2, w.shape[1]
    strides = (8 * width, outputs * width, width, 1)
    shape = (outputs // 8, 2, 8, width)
    return tensor_descriptor(w, shape, strides, (16, 2, 8, columns), _layout(4, 8 * w.element_size()))


@functools.cache
def _layout(rank: int, bits: int) -> gl.NVMMASharedLayout:
    """Return the layout in shared memory of a block of values of `bits` bits: rows of 128 bytes, swizzled."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)


@fast_launch
@gluon.jit(do_not_specialize=["rows", "outputs", "steps", "down", "across"])
def _gated_gemm_kernel(
    x_tiles, w_tiles, y_tiles, x_scales, w_scales, rows, outputs, steps, down, across,
    COLUMNS: gl.constexpr, SCALED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Compute tiles until none is left.

    A `ready` barrier says that a requested tile has arrived, a `free` barrier that both groups are done with it.
    """
    release_dependents(OVERLAP)
    dtype: gl.constexpr = x_tiles.dtype
    layout: gl.constexpr = x_tiles.layout
    a = gl.allocate_shared_memory(dtype, [_STAGES * _GROUPS, _ROWS, COLUMNS], layout)
    b = gl.allocate_shared_memory(dtype, [_STAGES, _BLOCK, COLUMNS], layout)
    c = gl.allocate_shared_memory(y_tiles.dtype, [_GROUPS, _ROWS, _BLOCK // 2], y_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=_GROUPS)
    fence_async_shared()
    memory = (a, b, c, ready, free)
    work = (steps, down, across)
    scales = (x_scales, w_scales, rows, outputs)
    gl.warp_specialize(
        [
            (_consumer_warps, (memory, work, scales, y_tiles, COLUMNS, SCALED, 0)),
            (_consumer_warps, (memory, work, scales, y_tiles, COLUMNS, SCALED, 1)),
            (_producer_warp, (memory, work, x_tiles, w_tiles, COLUMNS, OVERLAP)),
        ],
        [4, 1],
        [_MOST, 24],
    )


@gluon.jit
def _producer_warp(memory, work, x_tiles, w_tiles, COLUMNS: gl.constexpr, OVERLAP: gl.constexpr):
    """Request tiles for both groups, with one warp, as soon as there is room; tiles of W even before x is complete."""
    steps, down, across = work
    a, _, _, ready, free = memory
    ahead = 0
    if OVERLAP:
        ahead = gl.minimum(_STAGES, steps)
        _, n = _tile_coordinates(gl.program_id(0), work)
        for stage in gl.static_range(_STAGES):
            _load_w_async(w_tiles, n, stage, stage, memory, COLUMNS, stage < ahead)
    wait_for_inputs(OVERLAP)
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        m, n = _tile_coordinates(tile, work)
        for step in range(steps):
            mbarrier.wait(free.index(stage), phase)
            _load_w_async(w_tiles, n, step, stage, memory, COLUMNS, ahead <= 0)
            for group in gl.static_range(_GROUPS):
                at = [(m * _GROUPS + group) * _ROWS, step * COLUMNS]
                ask_for_tile(x_tiles, at, ready.index(stage), a.index(stage * _GROUPS + group))
            ahead -= 1
            stage, phase = _next(stage, phase)


@gluon.jit
def _load_w_async(w_tiles, n, step, stage, memory, COLUMNS: gl.constexpr, pred):
    """Request a tile of W, and tell the barrier how many bytes of W and x this step brings."""
    _, b, _, ready, _ = memory
    mbarrier.expect(ready.index(stage), (_GROUPS * _ROWS + _BLOCK) * _BYTES, pred=pred)
    into = b.index(stage).reshape([_BLOCK // 16, 2, 8, COLUMNS])
    ask_for_tile(w_tiles, [n * (_BLOCK // 16), 0, 0, step * COLUMNS], ready.index(stage), into, pred=pred)


@gluon.jit
def _consumer_warps(memory, work, scales, y_tiles, COLUMNS: gl.constexpr, SCALED: gl.constexpr, NUMBER: gl.constexpr):
    """Multiply 64 rows of each tile with four warps; the products of a step run while the warps wait for the next
    step."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK, COLUMNS // 4])
    steps, down, across = work
    a, b, c, ready, free = memory
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        m, n = _tile_coordinates(tile, work)
        nothing = gl.zeros([_ROWS, _BLOCK], gl.float32, layout)
        mbarrier.wait(ready.index(stage), phase)
        under_way = warpgroup_mma(
            a.index(stage * _GROUPS + NUMBER), b.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        values = warpgroup_mma_wait(1, (under_way,))
        before = stage
        stage, phase = _next(stage, phase)
        for _ in range(1, steps):
            mbarrier.wait(ready.index(stage), phase)
            under_way = warpgroup_mma(
                a.index(stage * _GROUPS + NUMBER), b.index(stage).permute((1, 0)), values, is_async=True
            )
            values = warpgroup_mma_wait(1, (under_way,))
            mbarrier.arrive(free.index(before))
            before = stage
            stage, phase = _next(stage, phase)
        values = warpgroup_mma_wait(0, (values,))
        mbarrier.arrive(free.index(before))
        own = c.index(NUMBER)
        if SCALED:
            values = _scaled(values, scales, (m * _GROUPS + NUMBER) * _ROWS, n, layout)
        made = _gated(values).to(own.dtype)
        tma.store_wait(0)  # the copy engine may still read what was written of the tile before
        own.store(made)
        fence_async_shared()
        send_tile(y_tiles, [(m * _GROUPS + NUMBER) * _ROWS, n * (_BLOCK // 2)], own)
    tma.store_wait(0)


@gluon.jit
def _scaled(values, scales, first_row, n, LAYOUT: gl.constexpr):
    x_scales, w_scales, rows, outputs = scales
    row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT))
    place = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    output = gl.minimum(n * (_BLOCK // 2) + place // 16 * 8 + place % 8, outputs - 1)
    of_outputs = gl.load(w_scales + output + place // 8 % 2 * outputs)
    return values * of_outputs[None, :] * gl.load(x_scales + gl.minimum(row, rows - 1))[:, None]


@gluon.jit
def _gated(values):
    """Return silu(gate) · up of sums that have eight gates before eight ups: [64, 256] → [64, 128]."""
    pairs = gl.permute(gl.reshape(values, [_ROWS, _BLOCK // 16, 2, 8]), (0, 1, 3, 2))
    gate, up = gl.split(pairs)
    return gl.reshape(gate * up / (1.0 + gl.exp2(gate * -1.4426950408889634)), [_ROWS, _BLOCK // 2])


@gluon.jit
def _tile_coordinates(tile, work):
    """Return which tile of rows and which of outputs a tile is: down a band of rows first, then across."""
    _, down, across = work
    band = tile // (_BAND * across)
    rest = tile - band * (_BAND * across)
    height = gl.minimum(_BAND, down - band * _BAND)
    return band * _BAND + rest % height, rest // height


@gluon.jit
def _next(stage, phase):
    stage += 1
    wraps = stage == _STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)
