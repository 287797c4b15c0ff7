"""Attention of steps in which every row has one token: norm, rotation, storing and attending in one pass.

Cut as in decode.py: a program takes one row, one KV head and one piece of the row's context. What it reads beside the
piece is little: the query heads of its group and the new key, (group + 1) · d elements, the rows of one tile, which it
norms and turns itself, and the new value. Each piece of a row makes the queries anew, which takes less time than a
kernel of its own, and a handing over, before this one.

The new token's key and value are not read from the cache, where they are not yet. The program that has the row's last
piece stores them, for the steps to come, and begins its running softmax with them: the highest score is the new key's,
with weight 1, and the sum is the new value. Then it goes through its piece as far as the cache had it before. So nobody
in the step reads what somebody stores in it, and nobody waits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.paged_rows import Partials
from quire.kernels.triton.attention import decode
from quire.kernels.triton.attention.decode import MERGED, leave_piece, see_piece
from quire.kernels.triton.attention.rotary import normed
from quire.kernels.triton.attention.scores import factors, padded, scores
from quire.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.kernels.triton.launching.launch import launched, next_power_of_2

_AHEAD = False
"""A program asks for its first tile's keys and values before it norms and turns, so that they are nearer after that."""


def rotate_and_attend(
    qkv: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    pieces: Tensor,
    partials: Partials,
    out: Tensor,
    scale: float,
    cap: float | None = None,
) -> None:
    """See the reference. Tokens of qkv may lie apart, and so may lines of the table; all else is contiguous."""
    _, block_size, kv_heads, d = keys.shape
    heads = out.shape[1]
    group, d_block = heads // kv_heads, padded(d)
    assert qkv.stride()[1:] == (d, 1)
    assert all(map(Tensor.is_contiguous, (keys, values, pieces, out)))
    assert all(t is None or t.is_contiguous() for t in (norm, cos, sin))
    assert pieces.shape[0] <= partials.outputs.shape[0]
    shape = decode.piece_shape(d, qkv.element_size())
    before, after = factors(scale, cap)
    overlap = can_overlap(qkv.device)
    _rotate_and_attend[(pieces.shape[0] * kv_heads,)](
        qkv, norm, cos, sin, keys, values, table, pieces, partials.outputs, partials.sums, partials.arrived, out,
        qkv.stride(0), table.stride(0), eps, before, after,
        CAPPED=cap is not None, HEADS=heads, KV_HEADS=kv_heads, GROUP=group,
        GROUP_BLOCK=next_power_of_2(group), M=padded(group + 1), D=d, D_BLOCK=d_block,
        HALF=0 if cos is None else cos.shape[-1], BLOCK_SIZE=block_size, COLUMNS=pieces.shape[1],
        TILE=shape.keys, MERGED=MERGED, STAGES=shape.stages, AHEAD=_AHEAD, OVERLAP=overlap,
        num_warps=shape.warps, launch_pdl=overlap,
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["table_line"], do_not_specialize_on_alignment=["pieces"])
def _rotate_and_attend(
    qkv,
    norm,
    cos,
    sin,
    keys,
    values,
    table,
    pieces,
    outputs,
    sums,
    arrived,
    out,
    qkv_token,
    table_line,
    eps,
    before,
    after,
    CAPPED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One piece and one KV head; `own` are its query heads and, as number GROUP, its new key, in M rows, as products
    want them. What comes out for the key, and for rows that do not exist, goes nowhere.
    """
    release_dependents(OVERLAP)
    piece, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    own, column, lane = tl.arange(0, M), tl.arange(0, D_BLOCK), tl.arange(0, TILE)
    wait_for_inputs(OVERLAP)
    line = pieces + piece * COLUMNS  # all of it is asked for at once: volatile loads stay before the branch
    token, slot = tl.load(line, volatile=True).to(tl.int64), tl.load(line + 1, volatile=True).to(tl.int64)
    begin, end = tl.load(line + 2, volatile=True), tl.load(line + 3, volatile=True)
    seen_from = tl.load(line + 4, volatile=True)
    first, count = tl.load(line + 5, volatile=True), tl.load(line + 6, volatile=True)
    blocks = table + slot * table_line
    if count > 0:
        is_last = piece == first + count - 1
        end -= is_last.to(tl.int32)
        # What is needed is asked for at once, and waited for once: volatile loads stay in this order.
        last_block = tl.load(blocks + end // BLOCK_SIZE, volatile=True)
        projected = qkv + token * qkv_token
        v_new = tl.load(projected + (HEADS + KV_HEADS + kv_head) * D + column, column < D, 0.0, volatile=True)
        if AHEAD and OVERLAP:
            early = (begin + lane >= seen_from) & (begin + lane < end)
            early_block = tl.load(blocks + tl.where(early, begin + lane, 0) // BLOCK_SIZE, volatile=True)
        head = kv_head * GROUP + own
        made = (own <= GROUP)[:, None] & (column < D)[None, :]
        turns = made & (column < 2 * HALF)[None, :]
        of_head = (tl.where(own < GROUP, head, HEADS + kv_head) * D)[:, None]
        x = tl.load(projected + of_head + column[None, :], made, 0.0, volatile=True)
        other = x
        if HALF > 0:
            of_pair = of_head + ((column + HALF) % (2 * HALF))[None, :]
            other = tl.load(projected + of_pair, turns, 0.0, volatile=True)
            angle = token * HALF + (column % HALF)[None, :] + tl.zeros((M, 1), tl.int32)
            c = tl.load(cos + angle, turns, 1.0).to(tl.float32)
            s = tl.load(sin + angle, turns, 0.0).to(tl.float32)
        if AHEAD and OVERLAP:
            early_place = ((early_block * BLOCK_SIZE + (begin + lane) % BLOCK_SIZE) * KV_HEADS + kv_head) * D
            _ask_for(keys + early_place, early, D)
            _ask_for(values + early_place, early, D)
        if norm is not None:
            scale = tl.rsqrt(tl.sum(x.to(tl.float32) * x.to(tl.float32), 1) / D + eps)[:, None]
            x = normed(x, scale, norm + of_head + column[None, :], made, own <= GROUP)
            if HALF > 0:
                other = normed(other, scale, norm + of_pair, turns, own <= GROUP)
        if HALF > 0:
            y = tl.where((column < HALF)[None, :], -other.to(tl.float32), other.to(tl.float32))
            x = (x.to(tl.float32) * c + y * s).to(x.dtype)
        if is_last:
            of_place = ((last_block * BLOCK_SIZE + end % BLOCK_SIZE) * KV_HEADS + kv_head) * D + column
            is_key = (own == GROUP)[:, None] & (column < D)[None, :]
            tl.store(keys + of_place[None, :] + tl.zeros((M, 1), tl.int32), x, is_key)
            tl.store(values + of_place, v_new, column < D)
        products = tl.dot(x, tl.trans(x), input_precision="ieee")
        with_new = scores(tl.sum(tl.where((own == GROUP)[None, :], products, 0.0), 1), before, after, CAPPED)
        highest = tl.where(is_last, with_new, float("-inf"))
        weights = tl.where(is_last & (lane == 0)[None, :], 1.0, 0.0) + tl.zeros((M, 1), tl.float32)
        total = tl.where(is_last, v_new.to(tl.float32), 0.0)[None, :] + tl.zeros((M, 1), tl.float32)
        highest, weights, total = see_piece(
            x, highest, weights, total, keys, values, blocks, begin, end, seen_from, kv_head, before, after,
            CAPPED, KV_HEADS, D, D_BLOCK, BLOCK_SIZE, TILE, STAGES,
        )  # fmt: skip
        leave_piece(
            highest, weights, total, piece, first, count, token, kv_head, outputs, sums, arrived, out,
            HEADS, KV_HEADS, GROUP, GROUP_BLOCK, M, D, D_BLOCK, MERGED,
        )  # fmt: skip


@triton.jit
def _ask_for(where, wanted, D: tl.constexpr):
    """Have the second cache fetch D elements from each place, 128 bytes at a time."""
    EACH: tl.constexpr = 1024 // where.dtype.element_ty.primitive_bitwidth
    for line in tl.static_range((D + EACH - 1) // EACH):
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l,r",
            [where + line * EACH, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
