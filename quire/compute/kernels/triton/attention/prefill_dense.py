"""Computes attention of long prompts on Hopper with busy matrix units (Shah et al. 2024, FlashAttention-3).

Each pair of a query and a key it sees takes 4 · d operations, at about two thirds of the peak rate of the GPU's matrix
units, which wait for nothing else. A program has three kinds of warps. One warp requests queries, keys and values from
the copy engine ahead of time. Two groups of four warps each own 64 queries of one head: while the units multiply one
tile, the group turns the scores of the previous tile into weights, and meanwhile the other group's products run. Keys
are taken from the last to the first, so that only the first few tiles need a mask. Programs stay on the GPU and take
one work item after the other, the longest first; the next item's data are read while the last one is computed.

The kernel is in Gluon, Triton's lower level, which states warps, barriers and copies explicitly: Triton itself would
run none of this in parallel.

compute-sanitizer's racecheck reports that the byte by which `warp_specialize` hands its groups their work is written
and read at the same time, although a barrier of all warps stands between. It reports this for any kernel whose groups
have a barrier of their own, and not for the same kernel without that barrier, so the report is an error of the tool.
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

from quire.compute.kernels.reference.attention_inputs import DenseTiles, Scores
from quire.compute.kernels.triton.attention.masks import CAUSAL, tile_mask, visible_range
from quire.compute.kernels.triton.attention.score_scaling import score_factors, sink_start
from quire.compute.kernels.triton.launching.device_properties import is_sm_90, multiprocessors
from quire.compute.kernels.triton.launching.launch import fast_launch, tensor_descriptor

ask_for_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name before Triton 3.9

QUERIES = 128
"""Queries of a program at a time: 64 for each of two groups of warps."""
_GROUPS = gl.constexpr(2)
_ROWS = gl.constexpr(64)
_REGISTERS = 168
"""Registers of a thread at the start, when 384 threads fill a multiprocessor; the copying warps then give theirs
away."""
_GL_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def serves_dense_prefill(device: torch.device, dtype: torch.dtype, d: int) -> bool:
    """Whether the kernel supports this device, dtype and width of heads."""
    return is_sm_90(device) and dtype in _GL_DTYPES and d in (64, 128, 256)


def prefill_attention_dense(q: Tensor, k: Tensor, v: Tensor, tiles: DenseTiles, scores: Scores, out: Tensor) -> None:
    """Implement reference/paged_attention.py's `prefill_attention_dense`; all tensors are contiguous.

    All tiles have QUERIES queries, except the last one of a row.
    """
    heads, d = q.shape[1:]
    kv_heads = k.shape[1]
    keys, stages = _shape(d)
    assert all(t.is_contiguous() for t in (q, k, v, *tiles, out))
    before, after = score_factors(scores)
    items = len(tiles.tokens) * heads
    _prefill_attention_dense[(min(items, multiprocessors(q.device)),)](
        _tensor_descriptor(q, 64), _tensor_descriptor(k, keys), _tensor_descriptor(v, keys), out,
        *tiles, scores.sinks, items, before, after,
        CAPPED=scores.cap is not None, HEADS=heads, GROUP=heads // kv_heads, D=d, N=keys, STAGES=stages,
        num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip


def _shape(d: int) -> tuple[int, int]:
    """Return the keys of a tile, and how many tiles of keys there is room for."""
    return (64, 2) if d == 256 else (128, 2)


def _tensor_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe x [tokens, heads, d] to the copy engine, which takes tiles of `rows` tokens and one head."""
    tokens, heads, d = x.shape
    return tensor_descriptor(x, (tokens, heads * d), (heads * d, 1), (rows, d), _layout(rows, d, x.dtype))


@functools.cache
def _layout(rows: int, d: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, d], _GL_DTYPES[dtype])


@fast_launch
@gluon.jit(
    do_not_specialize=["items"],
    do_not_specialize_on_alignment=["tile_tokens", "tile_queries", "tile_contexts", "tile_bases", "sinks"],
)
def _prefill_attention_dense(
    q_tiles, k_tiles, v_tiles, out, tile_tokens, tile_queries, tile_contexts, tile_bases, sinks, items, before,
    after,
    CAPPED: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Compute work items until none is left.

    A `ready` barrier says that the copy engine has delivered data, a `free` barrier that both groups are done with
    them.
    """
    q = gl.allocate_shared_memory(out.dtype.element_ty, [_GROUPS, _ROWS, D], q_tiles.layout)
    k = gl.allocate_shared_memory(out.dtype.element_ty, [STAGES, N, D], k_tiles.layout)
    v = gl.allocate_shared_memory(out.dtype.element_ty, [STAGES, N, D], v_tiles.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=_GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=_GROUPS)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=_GROUPS)
    fence_async_shared()
    memory = (q, k, v)
    barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free)
    tiles = (tile_tokens, tile_queries, tile_contexts, tile_bases, items)
    gl.warp_specialize(
        [
            (_consumer_warps, (memory, barriers, tiles, out, sinks, before, after, 0, CAPPED, HEADS, D, N, STAGES)),
            (_consumer_warps, (memory, barriers, tiles, out, sinks, before, after, 1, CAPPED, HEADS, D, N, STAGES)),
            (_producer_warp, (memory, barriers, tiles, q_tiles, k_tiles, v_tiles, HEADS, GROUP, D, N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load_work_item(tiles, item, HEADS: gl.constexpr, N: gl.constexpr):
    """Return the tile's first token, number of tokens, positions before them and base, and its number of key tiles."""
    tile_tokens, tile_queries, tile_contexts, tile_bases, items = tiles
    tile = gl.minimum(item, items - 1) // HEADS
    token, queries = gl.load(tile_tokens + tile), gl.load(tile_queries + tile).to(gl.int32)
    passed, base = gl.load(tile_contexts + tile).to(gl.int32), gl.load(tile_bases + tile).to(gl.int32)
    _, end = visible_range(passed, passed + queries, passed + queries, 0, CAUSAL)
    return token, queries, passed, base, (end + N - 1) // N


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _producer_warp(
    memory, barriers, tiles, q_tiles, k_tiles, v_tiles,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Request, with one warp, the data that the groups will need, as soon as they leave room for it."""
    q, k, v = memory
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    items = tiles[4]
    stage, phase, turn = 0, 1, 1
    item = gl.program_id(0)
    work = _load_work_item(tiles, item, HEADS, N)
    while item < items:
        token, base, number = work[0], work[3], work[4]
        head, item = item % HEADS, item + gl.num_programs(0)
        work = _load_work_item(tiles, item, HEADS, N)
        kv_column = head // GROUP * D
        mbarrier.wait(q_free, turn)
        turn ^= 1
        mbarrier.expect(q_ready, _GROUPS * _ROWS * D * 2)
        for group in gl.static_range(_GROUPS):
            at = [token.to(gl.int32) + group * _ROWS, head * D]
            ask_for_tile(q_tiles, at, q_ready, q.index(group))
        key = base + number * N
        while key > base:
            key -= N
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_ready.index(stage), N * D * 2)
            ask_for_tile(k_tiles, [key, kv_column], k_ready.index(stage), k.index(stage))
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_ready.index(stage), N * D * 2)
            ask_for_tile(v_tiles, [key, kv_column], v_ready.index(stage), v.index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _scaled_scores(s, before, after, CAPPED: gl.constexpr):
    """Return `scaled_scores` without the factor where there is no bound: it is applied with the exponential."""
    if CAPPED:
        s = after - 2.0 * after / (gl.exp2(s * before) + 1.0)
    return s


@gluon.jit
def _online_softmax(s, highest, total, factor, MAY_SEE_NOTHING: gl.constexpr):
    """Turn scores into weights; return them with the highest score, the sum of weights and the factor of earlier
    weights."""
    new_highest = gl.maximum(highest, gl.max(s, 1))
    basis = new_highest * factor
    if MAY_SEE_NOTHING:
        basis = gl.where(new_highest == float("-inf"), 0.0, basis)
    shrink = gl.exp2(highest * factor - basis)
    weights = gl.exp2(s * factor - gl.expand_dims(basis, 1))
    return weights, new_highest, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _masked(s, key, position, layout: gl.constexpr, N: gl.constexpr):
    """Return the scores of a tile of keys from `key` on, with -inf for keys that their query does not see."""
    keys = key + gl.arange(0, N, gl.SliceLayout(0, layout))
    begin, end = visible_range(position, position + 1, position + 1, 0, CAUSAL)
    return gl.where(tile_mask(gl.expand_dims(keys, 0), begin, gl.expand_dims(end, 1), CAUSAL), s, float("-inf"))


@gluon.jit
def _consumer_warps(
    memory, barriers, tiles, out, sinks, before, after,
    NUMBER: gl.constexpr, CAPPED: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Compute, with four warps, 64 queries of each work item.

    The products of queries and keys are one tile ahead of those of weights and values. Both are requested together.
    When the first products are done, their exponentials are taken, and only then does the code wait for the second
    ones. The wait for the next keys comes before that wait, because the compiler moves no exponentials across it.
    """
    q, k, v = memory
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    items = tiles[4]
    dtype: gl.constexpr = out.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    factor = before
    if CAPPED:
        factor = 1.0
    own_q = q.index(NUMBER)
    k_stage, k_phase, v_stage, v_phase, turn = 0, 0, 0, 0, 0
    nothing = gl.zeros([_ROWS, N], gl.float32, s_layout)
    item = gl.program_id(0)
    work = _load_work_item(tiles, item, HEADS, N)
    while item < items:
        token, queries, passed, number = work[0], work[1], work[2], work[4]
        head, item = item % HEADS, item + gl.num_programs(0)
        work = _load_work_item(tiles, item, HEADS, N)
        position = passed + NUMBER * _ROWS + gl.arange(0, _ROWS, s_rows)
        hidden = number - (passed + 1) // N  # tiles that not all queries see: at least one
        mbarrier.wait(q_ready, turn)
        turn ^= 1
        mbarrier.wait(k_ready.index(k_stage), k_phase)
        s = warpgroup_mma(own_q, k.index(k_stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, (s,))
        mbarrier.arrive(k_free.index(k_stage))
        k_stage, k_phase = _next(k_stage, k_phase, STAGES)
        key = (number - 1) * N
        s = _masked(_scaled_scores(s, before, after, CAPPED), key, position, s_layout, N)
        highest = gl.full([_ROWS], float("-inf"), gl.float32, s_rows)
        total = gl.zeros([_ROWS], gl.float32, s_rows)
        if sinks is not None:
            highest, total = sink_start(sinks, head + 0 * position, position >= 0)
            highest = highest / factor
        weights, highest, total, shrink = _online_softmax(s, highest, total, factor, True)
        o = gl.zeros([_ROWS, D], gl.float32, o_layout)
        mbarrier.wait(k_ready.index(k_stage), k_phase, pred=key > 0)
        for _ in range(1, gl.minimum(hidden, number)):
            key -= N
            s_token = warpgroup_mma(own_q, k.index(k_stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            w = gl.convert_layout(weights.to(dtype), weight_layout)
            mbarrier.wait(v_ready.index(v_stage), v_phase)
            o_token = warpgroup_mma(w, v.index(v_stage), o, is_async=True)
            s = warpgroup_mma_wait(1, (s_token,))
            mbarrier.arrive(k_free.index(k_stage))
            k_stage, k_phase = _next(k_stage, k_phase, STAGES)
            s = _masked(_scaled_scores(s, before, after, CAPPED), key, position, s_layout, N)
            weights, highest, total, shrink = _online_softmax(s, highest, total, factor, True)
            mbarrier.wait(k_ready.index(k_stage), k_phase, pred=key > 0)
            o, total = warpgroup_mma_wait(0, (o_token, total))
            mbarrier.arrive(v_free.index(v_stage))
            v_stage, v_phase = _next(v_stage, v_phase, STAGES)
            o = o * gl.expand_dims(gl.convert_layout(shrink, o_rows), 1)
        while key > 0:
            key -= N
            s_token = warpgroup_mma(own_q, k.index(k_stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            w = gl.convert_layout(weights.to(dtype), weight_layout)
            mbarrier.wait(v_ready.index(v_stage), v_phase)
            o_token = warpgroup_mma(w, v.index(v_stage), o, is_async=True)
            s = warpgroup_mma_wait(1, (s_token,))
            mbarrier.arrive(k_free.index(k_stage))
            k_stage, k_phase = _next(k_stage, k_phase, STAGES)
            s = _scaled_scores(s, before, after, CAPPED)
            weights, highest, total, shrink = _online_softmax(s, highest, total, factor, False)
            mbarrier.wait(k_ready.index(k_stage), k_phase, pred=key > 0)
            o, total = warpgroup_mma_wait(0, (o_token, total))
            mbarrier.arrive(v_free.index(v_stage))
            v_stage, v_phase = _next(v_stage, v_phase, STAGES)
            o = o * gl.expand_dims(gl.convert_layout(shrink, o_rows), 1)
        mbarrier.arrive(q_free)
        w = gl.convert_layout(weights.to(dtype), weight_layout)
        mbarrier.wait(v_ready.index(v_stage), v_phase)
        o = warpgroup_mma(w, v.index(v_stage), o, is_async=True)
        o = warpgroup_mma_wait(0, (o,))
        mbarrier.arrive(v_free.index(v_stage))
        v_stage, v_phase = _next(v_stage, v_phase, STAGES)
        o = o / gl.expand_dims(gl.convert_layout(total, o_rows), 1)
        query = NUMBER * _ROWS + gl.arange(0, _ROWS, o_rows)
        column = gl.arange(0, D, gl.SliceLayout(0, o_layout))
        place = gl.expand_dims(((token + query) * HEADS + head) * D, 1) + gl.expand_dims(column, 0)
        gl.store(out + place, o.to(dtype), gl.expand_dims(query < queries, 1) & (place >= 0))
