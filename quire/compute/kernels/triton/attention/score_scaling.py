"""What kernels of attention share: products of queries and keys to scores, how wide a head is in products, and
elements of a quantized cache.

Scores are in powers of two, which is how the GPU takes exponentials.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.compute.kernels.reference.attention_inputs import Scores
from quire.compute.kernels.triton.launching.launch import next_power_of_2

_LOG2_E = 1.4426950408889634


def score_factors(scores: Scores) -> tuple[float, float]:
    """What `scaled_scores` multiplies with, before and after its bound, if there is one."""
    if scores.cap is None:
        return scores.scale * _LOG2_E, 0.0
    return 2 * scores.scale / scores.cap * _LOG2_E, scores.cap * _LOG2_E


def padded_size(n: int) -> int:
    """The width of a head, or a number of rows, as products want it."""
    return max(16, next_power_of_2(n))


@triton.jit
def scaled_scores(products, before, after, CAPPED: tl.constexpr):
    """log2(e) · the score, so that its exponential is a power of two; bounded by tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    if CAPPED:
        return after - 2.0 * after / (tl.exp2(products * before) + 1.0)
    return products * before


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Elements of a cache as numbers of the products' dtype, which holds each of them exactly."""
    if x.dtype == tl.int8:
        return x.to(tl.float32).to(dtype)
    return x.to(dtype)
