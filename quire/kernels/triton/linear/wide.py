"""y = x Wᵀ for many rows of x on Hopper: the matrix units busy all the time.

2 · rows · outputs · columns operations, and for a few hundred rows about as long to read the weight. A program is three
or four kinds of warps. One warp asks the copy engine for tiles of x and W, some steps ahead. Two or three groups of
four warps each own 64 rows of a tile's first side: all of them multiply the same tile of the second side, so a step of
64 columns brings (64 · groups + block_b) · 128 bytes for as many products. Programs stay on the card and take one tile
after the other; tiles of the next one are read while the last one is written.

Where the tiles do not come out even, some of them are `streamed`: all programs take equal parts of their steps, so that
a tile is the work of several programs. Each leaves its sums in memory, and the one that finds itself the last adds all
parts in the order of the columns, so that the result is always the same. These come first; by the time whole tiles end,
nobody waits.

Gated, the weight has gates above and ups below. The copy engine takes eight rows of gates, the same eight of ups, and
so on: both of an output meet in one thread's registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

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

from quire.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.kernels.triton.launching.launch import cdiv

ask_for_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name before Triton 3.9
send_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
meet_threads = getattr(gl, "thread_barrier", None) or gl.barrier

_ROWS = gl.constexpr(64)
"""Of a group of four warps."""
_COLUMNS = gl.constexpr(64)
"""Of a step: 128 bytes of a row, as the copy engine lays them out for the matrix units."""
_BAND = 2048
"""Rows of x whose tiles run side by side, so that they find each other's rows in the card's cache."""
_MOST_PARTS = 3
"""Of a tile, about: whoever adds them has more to do than others."""
_REGISTERS = {2: (168, 240), 3: (128, 160)}
"""By groups: of a thread at the start, filling a multiprocessor; and of those that multiply, who take from the rest."""
_GL_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class Wide:
    """How the work is cut.

    Attributes:
        groups: Of four warps, each with 64 rows of a tile's first side: 2 or 3.
        block_b: Rows of a tile's second side: 128 or 256.
        stages: Steps under way at the same time.
        swapped: The first side is W, not x.
        streamed: What the last round of tiles leaves over is cut into equal parts for all programs.
    """

    groups: int
    block_b: int
    stages: int
    swapped: bool
    streamed: bool


def serves_wide(x: Tensor, w: Tensor, gate: bool) -> bool:
    """Whether the kernel exists for such operands: what the copy engine reads begins at 16-byte addresses."""
    made = w.shape[0] // 2 if gate else w.shape[0]
    return (
        x.device.type == "cuda"
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and x.dtype in _GL_DTYPES
        and x.stride(1) == 1
        and made % 8 == w.shape[1] % 8 == x.stride(0) % 8 == x.data_ptr() % 16 == w.data_ptr() % 16 == 0
    )


def wide_linear(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, cut: Wide, gate: bool, overlap: bool) -> None:
    """y = x Wᵀ + bias, or silu of its first half times the second where `gate`: x [rows, columns], y [rows, outputs].

    The rows of x may lie apart; w and y are contiguous.
    """
    rows, outputs = y.shape
    columns = w.shape[1]
    block_a = 64 * cut.groups
    block_w, block_x = (block_a, cut.block_b) if cut.swapped else (cut.block_b, block_a)
    down, across = cdiv(rows, block_x), cdiv(outputs, block_w // 2 if gate else block_w)
    tiles, steps = down * across, cdiv(columns, 64)
    programs = _multiprocessors(x.device)
    streamed = streamed_tiles(tiles, steps, programs) if cut.streamed else 0
    if not streamed:
        programs = min(programs, tiles)
    if streamed:
        sums = torch.empty((programs, 2, block_a * cut.block_b), dtype=torch.float32, device=x.device)
        arrived = _counters(x.device)
    else:
        sums = arrived = y  # neither is touched
    x_rows = cut.block_b if cut.swapped else 64
    w_rows = 64 if cut.swapped else cut.block_b
    registers, most = _REGISTERS[cut.groups]
    _wide_kernel[(programs,)](
        _described(x, x_rows),
        _weight_described(w, w_rows, gate),
        _written(y, cut, gate),
        w if bias is None else bias,
        sums,
        arrived,
        outputs,
        steps,
        down,
        across,
        streamed,
        GROUPS=cut.groups,
        BLOCK=cut.block_b,
        STAGES=cut.stages,
        SWAPPED=cut.swapped,
        STREAMED=streamed > 0,
        GATED=gate,
        BIASED=bias is not None,
        OVERLAP=overlap,
        BAND=_BAND // block_x,
        MOST=most,
        num_warps=4,
        maxnreg=registers,
        launch_pdl=overlap,
    )


def streamed_tiles(tiles: int, steps: int, programs: int) -> int:
    """How many tiles' steps are dealt out: those of the last round, and where they are few, of the one before it too.

    No program may be left without a step, for the parts of a tile are those of programs side by side.
    """
    left = tiles % programs
    if 0 < left * _MOST_PARTS < programs < tiles:
        left += programs
    return left if left * steps >= programs else 0


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """int32: how many parts of each group's rows of a tile are done. Zeros whenever no product is under way, for the
    last one puts them back; products of a device run one after another, on one stream."""
    return torch.zeros(2 * _multiprocessors(device) * max(_REGISTERS), dtype=torch.int32, device=device)


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    """[rows, columns] for the copy engine, which takes so many rows and 64 columns at a time."""
    block = (rows, 64)
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], list(block), _layout(block))


def _weight_described(w: Tensor, rows: int, gate: bool) -> TensorDescriptor:
    """The same; gated, eight rows of gates come before the same eight of ups: [eights, gate or up, 8, columns]."""
    if not gate:
        return _described(w, rows)
    outputs, columns = w.shape[0] // 2, w.shape[1]
    block = (rows // 16, 2, 8, 64)
    strides = [8 * columns, outputs * columns, columns, 1]
    return TensorDescriptor(w, [outputs // 8, 2, 8, columns], strides, list(block), _layout(block))


def _written(y: Tensor, cut: Wide, gate: bool) -> TensorDescriptor:
    """[rows, outputs] for the copy engine, which takes what one group has of a tile, at most 16 KB of it at a time."""
    if cut.swapped:
        block = (cut.block_b, 32) if gate else (128, 64)
    else:
        block = (64, cut.block_b // 2 if gate else 128)
    return TensorDescriptor(y, list(y.shape), [y.stride(0), 1], list(block), _layout(block))


@functools.cache
def _layout(block: tuple[int, ...]) -> gl.NVMMASharedLayout:
    """Of such a block of 16-bit values in shared memory: rows of 128 bytes, or of what there is."""
    width = min(128, 2 * block[-1])
    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=16, rank=len(block))


@gluon.jit(
    do_not_specialize=["outputs", "steps", "down", "across", "streamed"],
    do_not_specialize_on_alignment=["bias", "arrived"],
)
def _wide_kernel(
    x_tiles,
    w_tiles,
    y_tiles,
    bias,
    sums,
    arrived,
    outputs,
    steps,
    down,
    across,
    streamed,
    GROUPS: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    SWAPPED: gl.constexpr,
    STREAMED: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    OVERLAP: gl.constexpr,
    BAND: gl.constexpr,
    MOST: gl.constexpr,
):
    """Barriers say ready: what the copy engine was asked for is there; and free: all groups are done with it."""
    release_dependents(OVERLAP)
    dtype: gl.constexpr = y_tiles.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, _ROWS, _COLUMNS], tile)
    b = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, _COLUMNS], tile)
    c = gl.allocate_shared_memory(dtype, [GROUPS, y_tiles.block_shape[0], y_tiles.block_shape[1]], y_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    work = (outputs, steps, down, across, streamed)
    memory = (a, b, c, ready, free)
    rest = (sums, arrived, bias, y_tiles)
    how: gl.constexpr = (GROUPS, BLOCK, STAGES, SWAPPED, STREAMED, GATED, BIASED, BAND)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (memory, work, rest, 0, how)),
                (_compute, (memory, work, rest, 1, how)),
                (_copy, (memory, work, x_tiles, w_tiles, OVERLAP, how)),
            ],
            [4, 1],
            [MOST, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (memory, work, rest, 0, how)),
                (_compute, (memory, work, rest, 1, how)),
                (_compute, (memory, work, rest, 2, how)),
                (_copy, (memory, work, x_tiles, w_tiles, OVERLAP, how)),
            ],
            [4, 4, 1],
            [MOST, MOST, 24],
        )


@gluon.jit
def _begin(program, work):
    """Where a program's part of the streamed tiles' steps begins."""
    return program * (work[4] * work[1]) // gl.num_programs(0)


@gluon.jit
def _take(at, end, tile, work):
    """A piece of work: its tile, its steps from … to; and what is left, as `at` and `tile`."""
    steps = work[1]
    streams = at < end
    own = gl.where(streams, at // steps, tile)
    first = gl.where(streams, at - own * steps, 0)
    last = gl.where(streams, gl.minimum(steps, first + end - at), steps)
    return (
        own,
        first,
        last,
        gl.where(streams, at + last - first, at),
        gl.where(streams, tile, tile + gl.num_programs(0)),
    )


@gluon.jit
def _place(tile, work, BAND: gl.constexpr):
    """Which tile of rows and which of outputs: down a band of rows first, then across."""
    down, across = work[2], work[3]
    band = tile // (BAND * across)
    rest = tile - band * (BAND * across)
    height = gl.minimum(BAND, down - band * BAND)
    return band * BAND + rest % height, rest // height


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _ask_for_x(x_tiles, m, step, stage, memory, how: gl.constexpr):
    a, b, ready = memory[0], memory[1], memory[3]
    GROUPS: gl.constexpr = how[0]
    BLOCK: gl.constexpr = how[1]
    SWAPPED: gl.constexpr = how[3]
    if SWAPPED:
        ask_for_tile(x_tiles, [m * BLOCK, step * _COLUMNS], ready.index(stage), b.index(stage))
    else:
        for group in gl.static_range(GROUPS):
            at = [(m * GROUPS + group) * _ROWS, step * _COLUMNS]
            ask_for_tile(x_tiles, at, ready.index(stage), a.index(stage * GROUPS + group))


@gluon.jit
def _ask_for_w(w_tiles, n, step, stage, memory, pred, how: gl.constexpr):
    """And say how much is asked for at this step."""
    a, b, ready = memory[0], memory[1], memory[3]
    GROUPS: gl.constexpr = how[0]
    BLOCK: gl.constexpr = how[1]
    SWAPPED: gl.constexpr = how[3]
    GATED: gl.constexpr = how[5]
    mbarrier.expect(ready.index(stage), (GROUPS * _ROWS + BLOCK) * _COLUMNS * 2, pred=pred)
    ROWS: gl.constexpr = _ROWS if SWAPPED else BLOCK
    for group in gl.static_range(GROUPS if SWAPPED else 1):
        if SWAPPED:
            number = n * GROUPS + group
            into = a.index(stage * GROUPS + group)
        else:
            number = n
            into = b.index(stage)
        if GATED:
            into = into.reshape([ROWS // 16, 2, 8, _COLUMNS])
            at = [number * (ROWS // 16), 0, 0, step * _COLUMNS]
            ask_for_tile(w_tiles, at, ready.index(stage), into, pred=pred)
        else:
            ask_for_tile(w_tiles, [number * ROWS, step * _COLUMNS], ready.index(stage), into, pred=pred)


@gluon.jit
def _copy(memory, work, x_tiles, w_tiles, OVERLAP: gl.constexpr, how: gl.constexpr):
    """One warp: asks for what the groups will need, as soon as they leave room for it; for W even before x is there."""
    STAGES: gl.constexpr = how[2]
    BAND: gl.constexpr = how[7]
    free = memory[4]
    tiles = work[2] * work[3]
    program = gl.program_id(0)
    at, end, tile = _begin(program, work), _begin(program + 1, work), work[4] + program
    own, first, last, _, _ = _take(at, end, tile, work)
    m, n = _place(own, work, BAND)
    ahead = gl.where((at < end) | (tile < tiles), gl.minimum(STAGES, last - first), 0)
    if OVERLAP:
        for stage in gl.static_range(STAGES):
            _ask_for_w(w_tiles, n, first + stage, stage, memory, stage < ahead, how)
    else:
        ahead = 0
    wait_for_inputs(OVERLAP)
    stage, phase = 0, 1
    while (at < end) | (tile < tiles):
        own, first, last, at, tile = _take(at, end, tile, work)
        m, n = _place(own, work, BAND)
        for step in range(first, last):
            mbarrier.wait(free.index(stage), phase)
            _ask_for_w(w_tiles, n, step, stage, memory, ahead <= 0, how)
            _ask_for_x(x_tiles, m, step, stage, memory, how)
            ahead -= 1
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _compute(memory, work, rest, NUMBER: gl.constexpr, how: gl.constexpr):
    """Four warps: 64 rows of the first side of each tile. One step's products run while the next one is waited for."""
    GROUPS: gl.constexpr = how[0]
    BLOCK: gl.constexpr = how[1]
    STAGES: gl.constexpr = how[2]
    STREAMED: gl.constexpr = how[4]
    BAND: gl.constexpr = how[7]
    a, b, c, ready, free = memory
    steps = work[1]
    tiles = work[2] * work[3]
    WIDTH: gl.constexpr = (
        BLOCK if GROUPS == 2 else 128
    )  # of an instruction: 256 ask for registers before they are there
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    program = gl.program_id(0)
    at, end, tile = _begin(program, work), _begin(program + 1, work), work[4] + program
    stage, phase = 0, 0
    while (at < end) | (tile < tiles):
        own, first, last, at, tile = _take(at, end, tile, work)
        m, n = _place(own, work, BAND)
        nothing = gl.zeros([_ROWS, BLOCK], gl.float32, layout)
        mbarrier.wait(ready.index(stage), phase)
        under_way = warpgroup_mma(
            a.index(stage * GROUPS + NUMBER), b.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        values = warpgroup_mma_wait(1, (under_way,))
        before = stage
        stage, phase = _next(stage, phase, STAGES)
        for _ in range(first + 1, last):
            mbarrier.wait(ready.index(stage), phase)
            under_way = warpgroup_mma(
                a.index(stage * GROUPS + NUMBER), b.index(stage).permute((1, 0)), values, is_async=True
            )
            values = warpgroup_mma_wait(1, (under_way,))
            mbarrier.arrive(free.index(before))
            before = stage
            stage, phase = _next(stage, phase, STAGES)
        values = warpgroup_mma_wait(0, (values,))
        mbarrier.arrive(free.index(before))
        if STREAMED:
            if last - first < steps:
                complete, values = _meet(values, own, first, work, rest, NUMBER, how)
                if complete:
                    _write(values, m, n, c, work, rest, NUMBER, how)
            else:
                _write(values, m, n, c, work, rest, NUMBER, how)
        else:
            _write(values, m, n, c, work, rest, NUMBER, how)
    tma.store_wait(0)


@gluon.jit
def _slot(sums, number, SIZE: gl.constexpr):
    """Where a part of a tile is left: each program has two places, one for what it begins with."""
    return sums + number.to(gl.int64) * SIZE


@gluon.jit
def _meet(values, tile, first, work, rest, NUMBER: gl.constexpr, how: gl.constexpr):
    """Leave the sums of a part of a tile; whether all parts are there, and then their sums."""
    GROUPS: gl.constexpr = how[0]
    BLOCK: gl.constexpr = how[1]
    SIZE: gl.constexpr = GROUPS * _ROWS * BLOCK
    sums, arrived = rest[0], rest[1]
    steps, everything = work[1], work[4] * work[1]
    program, programs = gl.program_id(0), gl.num_programs(0)
    layout: gl.constexpr = values.type.layout
    row = NUMBER * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    place = gl.expand_dims(row * BLOCK, 1) + gl.expand_dims(column, 0)
    begin = tile * steps
    own = program * 2 + gl.where(_begin(program, work) < begin, 1, 0)
    gl.store(_slot(sums, own, SIZE) + place, values)
    meet_threads()  # every thread's part is written before one of them says so
    earliest = ((begin + 1) * programs - 1) // everything
    latest = ((begin + steps) * programs - 1) // everything
    complete = gl.atomic_add(arrived + tile * GROUPS + NUMBER, 1) == latest - earliest
    if complete:
        gl.store(arrived + tile * GROUPS + NUMBER, 0)
        part = earliest * 2 + gl.where(_begin(earliest, work) < begin, 1, 0)
        values = gl.load(_slot(sums, part, SIZE) + place, cache_modifier=".cg")
        for other in range(earliest + 1, latest + 1):
            values += gl.load(_slot(sums, other * 2, SIZE) + place, cache_modifier=".cg")
    return complete, values


@gluon.jit
def _write(values, m, n, c, work, rest, NUMBER: gl.constexpr, how: gl.constexpr):
    """What sums [64, BLOCK] make of y [rows, outputs]."""
    GROUPS: gl.constexpr = how[0]
    BLOCK: gl.constexpr = how[1]
    SWAPPED: gl.constexpr = how[3]
    GATED: gl.constexpr = how[5]
    BIASED: gl.constexpr = how[6]
    outputs = work[0]
    bias, y_tiles = rest[2], rest[3]
    layout: gl.constexpr = values.type.layout
    OUTS: gl.constexpr = (_ROWS if SWAPPED else BLOCK) // (2 if GATED else 1)
    if SWAPPED:
        row = m * BLOCK
        begin = (n * GROUPS + NUMBER) * OUTS
        if BIASED:
            place = _bias_places(begin, outputs, gl.arange(0, _ROWS, gl.SliceLayout(1, layout)), GATED)
            values += gl.expand_dims(gl.load(bias + place).to(gl.float32), 1)
        if GATED:
            pairs = gl.permute(gl.reshape(values, [_ROWS // 16, 2, 8, BLOCK]), (0, 2, 3, 1))
            values = gl.reshape(_gated(pairs), [OUTS, BLOCK])
    else:
        row = (m * GROUPS + NUMBER) * _ROWS
        begin = n * OUTS
        if BIASED:
            place = _bias_places(begin, outputs, gl.arange(0, BLOCK, gl.SliceLayout(0, layout)), GATED)
            values += gl.expand_dims(gl.load(bias + place).to(gl.float32), 0)
        if GATED:
            pairs = gl.permute(gl.reshape(values, [_ROWS, BLOCK // 16, 2, 8]), (0, 1, 3, 2))
            values = gl.reshape(_gated(pairs), [_ROWS, OUTS])
    own = c.index(NUMBER)
    if GATED or BLOCK == 128:
        _send(values, row, begin, own, y_tiles, SWAPPED)
    else:
        left, right = gl.split(gl.permute(gl.reshape(values, [_ROWS, 2, BLOCK // 2]), (0, 2, 1)))
        _send(left, row, begin, own, y_tiles, SWAPPED)
        if SWAPPED:
            _send(right, row + BLOCK // 2, begin, own, y_tiles, SWAPPED)
        else:
            _send(right, row, begin + BLOCK // 2, own, y_tiles, SWAPPED)


@gluon.jit
def _bias_places(begin, outputs, number, GATED: gl.constexpr):
    """Which of the weight's rows each of a tile's is; past the end the last one."""
    if GATED:
        place = gl.minimum(begin + number // 16 * 8 + number % 8, outputs - 1) + number // 8 % 2 * outputs
    else:
        place = gl.minimum(begin + number, outputs - 1)
    return place


@gluon.jit
def _gated(pairs):
    """silu(gate) · up, of pairs in the last place."""
    gate, up = gl.split(pairs)
    return gate * up / (1.0 + gl.exp2(gate * -1.4426950408889634))


@gluon.jit
def _send(values, row, begin, own, y_tiles, SWAPPED: gl.constexpr):
    """By way of the group's shared memory, which the copy engine may still be reading for the time before."""
    tma.store_wait(0)
    if SWAPPED:
        own.permute((1, 0)).store(values.to(own.dtype))
    else:
        own.store(values.to(own.dtype))
    fence_async_shared()
    send_tile(y_tiles, [row, begin], own)
