"""Computes the two matrix products of decode_large_batch.py, with 16-bit operands or 8-bit ones that become fp16
(KIND)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from quire.compute.kernels.triton.attention.eight_bit_operands import halves_of_pairs, halves_of_queries

M = gl.constexpr(16)
"""Rows of a product: the query heads of a KV head, padded."""


@gluon.jit
def load_queries(
    q, unit, line, before,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, WORDS: gl.constexpr, KIND: gl.constexpr,
    dtype: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Return one or two operands with the queries of the unit's token and KV head, and the factor of their products."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    own, column = gl.arange(0, M, gl.SliceLayout(1, left)), gl.arange(0, WORDS, gl.SliceLayout(0, left))
    token, _, _, _, _, _, count = line
    begin = (token.to(gl.int64) * HEADS + unit % KV_HEADS * GROUP + own) * WORDS
    exists = (own < GROUP) & (count > 0)
    found = gl.load(q + begin[:, None] + column[None, :], exists[:, None], 0)
    if KIND != "":
        first, second, factor = halves_of_queries(found, dtype)
        made = (first, second), gl.convert_layout(factor * before, gl.SliceLayout(1, mma))[:, None]
    else:
        made = (found,), before  # type: ignore[assignment]
    return made


@gluon.jit
def products_with_keys(x, keys, TILE: gl.constexpr, KIND: gl.constexpr, mma: gl.constexpr):
    """Return [M, TILE], the products of query operands and keys in shared memory."""
    found = keys.permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2))
    nothing = gl.zeros([M, TILE], gl.float32, mma)
    if KIND != "":
        first, second = halves_of_pairs(found, KIND)
        score = mma_v2(x[1], second, mma_v2(x[0], first, nothing))
    else:
        score = mma_v2(x[0], found, nothing)
    return score


@gluon.jit
def no_total(WORDS: gl.constexpr, KIND: gl.constexpr, mma: gl.constexpr):
    """Return zero sums of values: one tensor, or two halves."""
    total = gl.zeros([M, WORDS], gl.float32, mma)
    if KIND != "":
        totals = (total, total)
    else:
        totals = (total,)  # type: ignore[assignment]
    return totals


@gluon.jit
def with_values(total, weight, values, shrink, KIND: gl.constexpr, dtype: gl.constexpr, mma: gl.constexpr):
    """Return the sums with a tile of values from shared memory added."""
    found = values.load(gl.DotOperandLayout(1, mma, 2))
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    if KIND != "":
        first, second = halves_of_pairs(found, KIND)
        own = gl.convert_layout(weight.to(gl.float16), left)
        one, other = total[0] * shrink[:, None], total[1] * shrink[:, None]
        made = (mma_v2(own, first, one), mma_v2(own, second, other))
    else:
        own = gl.convert_layout(weight.to(dtype), left)
        made = (mma_v2(own, found, total[0] * shrink[:, None]),)  # type: ignore[assignment]
    return made


@gluon.jit
def joined(total, KIND: gl.constexpr, D: gl.constexpr):
    """Return the sums as [M, D], with the columns in their order."""
    if KIND != "":
        made = gl.reshape(gl.join(total[0], total[1]), [M, D])
    else:
        made = total[0]
    return made
