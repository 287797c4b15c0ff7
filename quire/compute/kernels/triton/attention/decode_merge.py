"""Merges the results of a row's splits, in their order, for decode_large_batch.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_MERGED = gl.constexpr(8)
"""The number of splits that are read at a time."""


@gluon.jit
def merge_kv_splits(
    outputs, sums, first, count, head, result,
    HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_BLOCK: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Merge a row's splits, WIDTH columns at a time.

    Other programs' results are read past the multiprocessor's own cache, which may hold older values.
    """
    lanes: gl.constexpr = min(WIDTH // 4, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 // lanes, lanes], [1, 1, 1], [2, 1, 0])
    of_sums: gl.constexpr = gl.SliceLayout(2, layout)
    of_total: gl.constexpr = gl.SliceLayout(0, layout)
    number, own = (
        gl.arange(0, _MERGED, gl.SliceLayout(1, of_sums)),
        gl.arange(0, GROUP_BLOCK, gl.SliceLayout(0, of_sums)),
    )
    row, column = (
        gl.arange(0, GROUP_BLOCK, gl.SliceLayout(1, of_total)),
        gl.arange(0, WIDTH, gl.SliceLayout(0, of_total)),
    )
    exists = (row < GROUP)[:, None]
    for begin in range(0, D, WIDTH):
        highest = gl.full([GROUP_BLOCK], float("-inf"), gl.float32, gl.SliceLayout(0, of_sums))
        weights = gl.zeros([GROUP_BLOCK], gl.float32, gl.SliceLayout(0, of_sums))
        total = gl.zeros([GROUP_BLOCK, WIDTH], gl.float32, of_total)
        for at in range(0, count, _MERGED):
            place = (first + at + number)[:, None] * HEADS + head + own[None, :]  # [_MERGED, GROUP_BLOCK]
            there = (at + number < count)[:, None] & (own < GROUP)[None, :]
            their_highest = gl.load(sums + place * 2, there, float("-inf"), cache_modifier=".cg")
            their_weights = gl.load(sums + place * 2 + 1, there, 0.0, cache_modifier=".cg")
            where = (place * D + begin)[:, :, None] + gl.expand_dims(column[None, :], 0)
            part = gl.load(outputs + where, there[:, :, None], 0.0, cache_modifier=".cg")
            new_highest = gl.maximum(highest, gl.max(their_highest, 0))
            new_highest = gl.where(own < GROUP, new_highest, 0.0)
            shrink = gl.exp2(highest - new_highest)
            share = gl.exp2(their_highest - new_highest[None, :])
            of_rows = gl.convert_layout(shrink, row.type.layout)
            total = total * of_rows[:, None] + gl.sum(part * share[:, :, None], 0)
            weights = weights * shrink + gl.sum(their_weights * share, 0)
            highest = new_highest
        total = total / gl.convert_layout(weights, row.type.layout)[:, None]
        gl.store(result + row[:, None] * D + begin + column[None, :], total.to(result.dtype.element_ty), exists)
