"""Computes a mixture of experts in packed mxfp4 for many tokens of each expert, on Hopper's matrix units.

Pairs are sorted by expert (see `routing`), and their rows of x are gathered in that order and in the tensor core's
order of columns, so that the copy engine brings tiles of them to shared memory. A program multiplies a tile of one
expert's pairs by 64 or 128 rows of its weight; an expert's last tile, which may have few pairs, is computed in a
smaller size if possible. As in packed_gemm_many.py, one product is always under way, not waited for, while codes for
the next one are expanded in registers.
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

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.reference.experts import ExpertAdapters, ExpertBiases
from quire.compute.kernels.triton.experts.expert_adapters import added_rows
from quire.compute.kernels.triton.experts.expert_gemms import constants_of, sum_choices
from quire.compute.kernels.triton.experts.mxfp4_few import expand, write_gated, write_scaled
from quire.compute.kernels.triton.experts.mxfp4_layout import PackedExperts, gather_rows
from quire.compute.kernels.triton.experts.routing import group_by_expert
from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, tensor_descriptor
from quire.compute.kernels.triton.linear.packed_gemm import ask_for_tile, barrier, layout_of_x

SMALL = 64
"""Rows of x of the smaller tiles that last tiles may be computed in."""


@dataclass(frozen=True)
class ManyConfig:
    """How the work is divided.

    Attributes:
        block_m: Rows of x of a tile, at least 16.
        warpgroups: Warpgroups of a program, each with 64 rows of the weight.
        ring: Steps of 128 columns of x in shared memory.
    """

    block_m: int
    warpgroups: int
    ring: int


def mxfp4_many(
    x: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    configs: tuple[ManyConfig, ManyConfig],
    overlap: bool,
    partial: bool = False,
    adapters: ExpertAdapters | None = None,
    activation: Activation = SILU,
    biases: ExpertBiases | None = None,
) -> None:
    """Compute the op `experts`; arguments as in `gemv_by_pair`. Both configs have the same block_m."""
    chosen, pairs, experts = numbers.shape[1], numbers.numel(), len(down.words)
    block_m = configs[0].block_m
    order, tiles = group_by_expert(numbers, experts, block_m)
    rows = gather_rows(x, order, chosen)
    middle = torch.empty((pairs, down.columns), dtype=x.dtype, device=x.device)
    parts = torch.empty((pairs, down.rows), dtype=x.dtype, device=x.device)
    of_gate_up, of_down = biases or (None, None)
    added_to, adapted = added_rows(numbers, adapters), adapters is not None

    def launch(
        x: Tensor, of_adapters: Tensor, w: PackedExperts, bias: Tensor | None, y: Tensor, config: ManyConfig
    ) -> None:
        m, t, places = config.block_m, config.warpgroups, tiles.shape[1]
        added, slots = added_to(of_adapters, y, w.gated)
        _many_kernel[(cdiv(w.rows, 64 * t) * places,)](
            *(tensor_descriptor(x, tuple(x.shape), x.stride(), (n, 64), layout_of_x()) for n in (m, min(m, SMALL))),
            w.words, w.scales, bias, order, tiles, weights, added, slots, y, places,
            CHOSEN=chosen, **constants_of(activation), ROWS=w.rows, UNITS=w.columns // 64, M=m, T=t, B=config.ring,
            FIRST=w.gated, SORTED=adapters is None, ADAPTED=adapted, OVERLAP=overlap,
            num_warps=4 * t, launch_pdl=overlap,
        )  # fmt: skip

    launch(rows, x, gate_up, of_gate_up, middle, configs[0])
    sorted_rows = middle if adapters is None else gather_rows(middle, order, 1)
    launch(sorted_rows, middle, down, of_down, parts, configs[1])
    sum_choices(parts, out, numbers, experts, overlap, partial)


@fast_launch
@gluon.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=["slots"])
def _many_kernel(
    x, small_x, words, scales, biases, order, tiles, weights, added, slots, y, places,
    CHOSEN: gl.constexpr, KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, ROWS: gl.constexpr,
    UNITS: gl.constexpr, M: gl.constexpr, T: gl.constexpr, B: gl.constexpr, FIRST: gl.constexpr,
    SORTED: gl.constexpr, ADAPTED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Compute 64 · T rows of the weight for a tile of pairs.

    The tiles come from a kernel that the first product waited for before its dependents could start.
    """
    ACROSS: gl.constexpr = (ROWS + 64 * T - 1) // (64 * T)
    place = gl.program_id(0) // ACROSS
    n_tile = gl.program_id(0) % ACROSS * T
    if FIRST:
        wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    begin = gl.load(tiles + places + place, cache_modifier=".cg")
    end = gl.load(tiles + 2 * places + place, cache_modifier=".cg")
    expert = gl.load(tiles + place, cache_modifier=".cg")
    SMALL_M: gl.constexpr = small_x.block_shape[0]
    if M > SMALL_M and end - begin > SMALL_M:
        _multiply_tile(
            x, words, scales, biases, order, weights, added, slots, y, n_tile, begin, end, expert,
            CHOSEN, KIND, ALPHA, LIMIT, ROWS, UNITS, M, T, B, FIRST, SORTED, ADAPTED, OVERLAP,
        )  # fmt: skip
    if (begin < end) & (end - begin <= SMALL_M):
        _multiply_tile(
            small_x, words, scales, biases, order, weights, added, slots, y, n_tile, begin, end, expert,
            CHOSEN, KIND, ALPHA, LIMIT, ROWS, UNITS, SMALL_M, T, B, FIRST, SORTED, ADAPTED, OVERLAP,
        )  # fmt: skip
    if not FIRST and begin >= end:
        wait_for_inputs(OVERLAP)  # whoever waits for this kernel must see the work of those before it


@gluon.jit
def _multiply_tile(
    x, words, scales, biases, order, weights, added, slots, y, n_tile, begin, end, expert,
    CHOSEN: gl.constexpr, KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, ROWS: gl.constexpr,
    UNITS: gl.constexpr, M: gl.constexpr, T: gl.constexpr, B: gl.constexpr, FIRST: gl.constexpr,
    SORTED: gl.constexpr, ADAPTED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * T, 1], [16, M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [T, 4], [1, 0])
    quads: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [T, 4, 1], [2, 1, 0])
    of_quads: gl.constexpr = gl.SliceLayout(2, quads)
    STRIPS: gl.constexpr = ROWS // 16
    x_memory = gl.allocate_shared_memory(x.dtype, [2 * B, M, 64], x.layout)
    t_index = gl.arange(0, T, layout=gl.SliceLayout(1, flat))[:, None]
    index = gl.arange(0, 512, layout=gl.SliceLayout(0, flat))[None, :]
    strip = gl.minimum((n_tile + t_index) * 4, STRIPS - 4) + index // 128  # past the end, the last rows repeat
    w_from = words + (expert.to(gl.int64) * STRIPS + strip) * (UNITS * 128) + index % 128
    s_t = gl.arange(0, T, layout=gl.SliceLayout(1, of_quads))[:, None]
    s_index = gl.arange(0, 128, layout=gl.SliceLayout(0, of_quads))[None, :]  # warp (2), row of eight (3), l (2)
    s_strip = gl.minimum((n_tile + s_t) * 4, STRIPS - 4) + s_index // 32
    s_from = scales + (expert.to(gl.int64) * STRIPS + s_strip) * (UNITS * 8) + s_index % 32 // 4
    sources = (w_from, s_from, index * 0, s_index * 0)
    now = _load_step(sources, 0, UNITS)
    following = _load_step(sources, 1, UNITS)
    ready = gl.allocate_shared_memory(gl.int64, [B, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(B):
        mbarrier.init(ready.index(number), count=1)
    fence_async_shared()
    barrier()
    if not FIRST:
        wait_for_inputs(OVERLAP)
    for early in gl.static_range(B):
        _ask_for_halves(x, begin, early, early, ready, x_memory, M, 2 * early < UNITS)
    acc = _biases(biases, n_tile, expert, ROWS, M, T, FIRST, mma)
    a = _expand_half(now[0], now[2], T, flat, quads, operand)
    stage = 0
    before = 0
    phase = 0
    for step in range((UNITS + 1) // 2):
        mbarrier.wait(ready.index(stage), phase)
        under_way = warpgroup_mma(a, x_memory.index(2 * stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, (under_way,))  # all of the step before is done
        b = _expand_half(now[1], now[3], T, flat, quads, operand)
        barrier()
        ahead = step - 1 + B
        more = (step > 0) & (2 * ahead < UNITS)
        _ask_for_halves(x, begin, ahead, before, ready, x_memory, M, more)
        under_way = warpgroup_mma(b, x_memory.index(2 * stage + 1).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, (under_way,))
        now = following
        following = _load_step(sources, step + 2, UNITS)
        a = _expand_half(now[0], now[2], T, flat, quads, operand)  # the last one is not used
        before = stage
        stage += 1
        phase = gl.where(stage == B, phase ^ 1, phase)
        stage = gl.where(stage == B, 0, stage)
    acc = warpgroup_mma_wait(0, (acc,))
    _write_tile(
        acc, order, weights, added, slots, y, n_tile, begin, end,
        CHOSEN, KIND, ALPHA, LIMIT, ROWS, M, T, FIRST, SORTED, ADAPTED,
    )  # fmt: skip


@gluon.jit
def _biases(
    biases, n_tile, expert, ROWS: gl.constexpr, M: gl.constexpr, T: gl.constexpr, FIRST: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Return sums [64 T, M] of the biases alone."""
    sums = gl.zeros([64 * T, M], gl.float32, mma)
    if biases is not None:
        n = n_tile * 64 + gl.arange(0, 64 * T, layout=gl.SliceLayout(1, mma))
        row = n // 16 * 8 + n % 8 + n % 16 // 8 * (ROWS // 2) if FIRST else n
        found = gl.load(biases + expert.to(gl.int64) * ROWS + row, mask=n < ROWS, other=0.0)
        sums += (found.to(gl.float32) * 1.0842021724855044e-19)[:, None]
    return sums


@gluon.jit
def _write_tile(
    acc, order, weights, added, slots, y, n_tile, begin, end,
    CHOSEN: gl.constexpr, KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, ROWS: gl.constexpr,
    M: gl.constexpr, T: gl.constexpr, FIRST: gl.constexpr, SORTED: gl.constexpr, ADAPTED: gl.constexpr,
):  # fmt: skip
    rows: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4 * T], [0, 1])
    m = begin + gl.arange(0, M, layout=gl.SliceLayout(0, rows))
    pair = gl.load(order + m, mask=m < end, other=0)
    sums = acc * 9223372036854775808.0
    if FIRST:
        gate, up = gl.split(gl.permute(gl.reshape(sums, [4 * T, 2, 8, M]), (0, 2, 3, 1)))
        gate = gl.convert_layout(gl.reshape(gate, [32 * T, M]), rows)
        up = gl.convert_layout(gl.reshape(up, [32 * T, M]), rows)
        write_gated(
            gate, up, added, slots, y, n_tile * 32, m, pair, end,
            CHOSEN, KIND, ALPHA, LIMIT, ROWS // 2, 32 * T, SORTED, ADAPTED, rows,
        )  # fmt: skip
    else:
        factors = gl.load(weights + pair, mask=m < end, other=0.0).to(gl.float32)
        write_scaled(
            gl.convert_layout(sums, rows), factors, added, slots, y, n_tile * 64, m, pair, end,
            CHOSEN, ROWS, 64 * T, ADAPTED, rows,
        )  # fmt: skip


@gluon.jit
def _ask_for_halves(x, row, step, stage, ready, x_memory, M: gl.constexpr, pred):
    """Request two tiles of x; columns past the end are 0."""
    mbarrier.expect(ready.index(stage), M * 256, pred=pred)
    ask_for_tile(x, [row, step * 128], ready.index(stage), x_memory.index(2 * stage), pred=pred)
    ask_for_tile(x, [row, step * 128 + 64], ready.index(stage), x_memory.index(2 * stage + 1), pred=pred)


@gluon.jit
def _load_step(sources, step, UNITS: gl.constexpr):
    """Return words and exponents of both halves of a step; words are 0 behind the last tile."""
    w_from, s_from, none, s_none = sources
    unit = step * 2
    low = gl.load(w_from + unit * 128, mask=none + unit < UNITS, other=0, eviction_policy="evict_first")
    high = gl.load(w_from + (unit + 1) * 128, mask=none + unit + 1 < UNITS, other=0, eviction_policy="evict_first")
    s_low = gl.load(s_from + unit * 8, mask=s_none + unit < UNITS, other=0)
    s_high = gl.load(s_from + (unit + 1) * 8, mask=s_none + unit + 1 < UNITS, other=0)
    return low, high, s_low, s_high


@gluon.jit
def _expand_half(words, exponents, T: gl.constexpr, flat: gl.constexpr, quads: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the values of words [T, 512], [64 T, 64] bf16."""
    four = gl.expand_dims(exponents, 2) + gl.zeros([T, 128, 4], gl.int32, quads)
    of_words = gl.convert_layout(gl.reshape(four, [T, 512]), flat)
    return expand(words, of_words, [T, 4], [64 * T, 64], LAYOUT)
