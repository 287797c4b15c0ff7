"""What temperature, min_p, top_p and the random number come to in keys and weights, for one row."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.reference.sample import EVERY_TOKEN
from quire.kernels.triton.sampling.logit_keys import key_of
from quire.sampling import MIN_TEMPERATURE

COLDEST = tl.constexpr(MIN_TEMPERATURE)
EVERY = tl.constexpr(EVERY_TOKEN)
DEPTH = tl.constexpr(41.0)
"""So many powers of two below the likeliest, a weight is 0."""


@triton.jit
def random_number(seed, drawn):
    """The number in [0, 1) of (seed, drawn), as a fraction of 2^64: 53 bits, then zeros."""
    low, high = (drawn & 0xFFFFFFFF).to(tl.uint32), ((drawn >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    return ((first.to(tl.uint64) << 21) | (second >> 11).to(tl.uint64)) << 11


@triton.jit
def target_of(number, total):
    """The share `number` of a total weight, rounded down: the token is the first beyond it."""
    return tl.umulhi(number, total.to(tl.uint64)).to(tl.int64)


@triton.jit
def floor_of(best, scale, likely, BITS: tl.constexpr, EDGES: tl.constexpr):
    """The lowest key that min_p leaves, an int64; nothing without weight is left, unless the edges are asked for."""
    least = best + tl.where(likely > 0, tl.log2(tl.maximum(likely, 1e-37)), float("-inf")) / scale
    if not EDGES:
        least = tl.maximum(least, best - DEPTH / scale)
    key = key_of(least, 32).to(tl.int64)
    if BITS == 16:  # the lowest bfloat16 that is not below
        key = tl.where(key < 0, key >> 16, (key + 0xFFFF) >> 16)
    return key


@triton.jit
def aim_of(p, mass):
    """What the weights of the likeliest must reach for top_p: a token stays if those before it weigh less."""
    return tl.maximum(tl.ceil(p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def equals_that_reach(missing, weight):
    """How many tokens of this weight it takes."""
    return tl.where(weight > 0, (missing + weight - 1) // tl.maximum(weight, 1), EVERY)
