"""Turns products into scores, starts softmaxes, pads sizes and widens cache elements, for all attention kernels.

Scores are logarithms to the base of 2, because the GPU's exponential is a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.compute.kernels.reference.attention_inputs import Scores
from quire.compute.kernels.triton.launching.launch import next_power_of_2

_LOG2_E = 1.4426950408889634
_LOG2_E_OF_SINKS = tl.constexpr(_LOG2_E)


def score_factors(scores: Scores) -> tuple[float, float]:
    """Return the factors that `scaled_scores` applies before and after its bound, if there is one."""
    if scores.cap is None:
        return scores.scale * _LOG2_E, 0.0
    return 2 * scores.scale / scores.cap * _LOG2_E, scores.cap * _LOG2_E


def padded_size(n: int) -> int:
    """Return the width of a head, or a number of rows, as matrix products need it."""
    return max(16, next_power_of_2(n))


@triton.jit
def scaled_scores(products, before, after, CAPPED: tl.constexpr):
    """Return log2(e) · score, so that its exponential is a power of two; the bound uses tanh(x) = 1 - 2 / (exp(2 x) +
    1)."""
    if CAPPED:
        return after - 2.0 * after / (tl.exp2(products * before) + 1.0)
    return products * before


@triton.jit
def load_slopes(slopes, head, exists):
    """Return log2(e) · slope of each row's query head [rows], which are zeros if there are none."""
    own = tl.zeros(head.shape, tl.float32)
    if slopes is not None:
        own = tl.load(slopes + head, exists, 0.0) * _LOG2_E_OF_SINKS
    return own


@triton.jit
def with_slopes(scores, slopes, own, key, position):
    """Return scores [rows, keys] plus slope · (key - position), if there are slopes, which are `own` [rows]; positions
    are of keys [keys], and of queries [rows, 1] or one for all."""
    if slopes is not None:
        scores += own[:, None] * (key[None, :] - position).to(tl.float32)
    return scores


@triton.jit
def softmax_start(sinks, head, is_first):
    """Return the highest score, log2(e) · score, and the sum of weights of softmaxes that have seen no key yet.

    Args:
        sinks: Each head's sink, as in `Scores`; None: there are none.
        head: [rows], the query head of each row.
        is_first: [rows] or one for all, whether the row exists and its sink counts here: of split keys, the first split
            alone counts it.
    """
    if sinks is None:
        highest = tl.full(head.shape, float("-inf"), tl.float32)
        started = tl.zeros(head.shape, tl.float32)
    else:
        highest, started = sink_start(sinks, head, is_first)
    return highest, started


@triton.jit
def sink_start(sinks, head, is_first):
    """Return the result of `softmax_start` where there are sinks; Gluon's kernels call it too."""
    highest = tl.load(sinks + head, is_first, float("-inf")) * _LOG2_E_OF_SINKS
    return highest, (highest > float("-inf")).to(tl.float32)


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Return elements of a cache in the products' dtype, which holds each of them exactly."""
    if x.dtype == tl.int8:
        return x.to(tl.float32).to(dtype)
    return x.to(dtype)
