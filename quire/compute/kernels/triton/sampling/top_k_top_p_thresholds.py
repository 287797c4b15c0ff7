"""min_p, top_k and top_p of one row as thresholds: logit keys, weights and how many ties stay."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.compute.kernels.reference.sample import ALL_TIES
from quire.compute.kernels.triton.sampling.logit_keys import logit_to_key
from quire.sampling_params import MIN_TEMPERATURE

LOWEST_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
KEEP_ALL_TIES = tl.constexpr(ALL_TIES)
ZERO_WEIGHT_LOG2 = tl.constexpr(41.0)
"""A weight this many powers of two below the likeliest is 0."""


@triton.jit
def philox_number(seed, drawn):
    """The number in [0, 1) of (seed, drawn), as a fraction of 2^64: 53 bits, then zeros."""
    low, high = (drawn & 0xFFFFFFFF).to(tl.uint32), ((drawn >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    return ((first.to(tl.uint64) << 21) | (second >> 11).to(tl.uint64)) << 11


@triton.jit
def target_mass(number, total):
    """The share `number` of a total weight, rounded down: the token is the first beyond it."""
    return tl.umulhi(number, total.to(tl.uint64)).to(tl.int64)


@triton.jit
def min_p_floor(best, scale, likely, BITS: tl.constexpr, WRITE_THRESHOLDS: tl.constexpr):
    """The lowest key that min_p leaves, int64. Unless thresholds are written, nothing without weight is left either."""
    least = best + tl.where(likely > 0, tl.log2(tl.maximum(likely, 1e-37)), float("-inf")) / scale
    if not WRITE_THRESHOLDS:
        least = tl.maximum(least, best - ZERO_WEIGHT_LOG2 / scale)
    key = logit_to_key(least, 32).to(tl.int64)
    if BITS < 32:  # the lowest of the narrower dtype that is not below
        SPARE: tl.constexpr = 32 - BITS
        key = tl.where(key < 0, key >> SPARE, (key + ((1 << SPARE) - 1)) >> SPARE)
    return key


@triton.jit
def top_p_mass(p, mass):
    """What the weights of the likeliest must reach for top_p: a token stays if those before it weigh less."""
    return tl.maximum(tl.ceil(p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def num_ties_to_keep(missing, weight):
    """How many tokens of this weight it takes to add the `missing` weight."""
    return tl.where(weight > 0, (missing + weight - 1) // tl.maximum(weight, 1), KEEP_ALL_TIES)
