"""Logits as integers of the same order, groups that find the highest of a row without sorting it, and thresholds.

A row is read once and each group of it (16 to 256 neighbours) leaves its highest key. The k-th highest of these is a
floor under the k highest logits of the row: at least k of them lie on it or above, and only the groups that reach it
need to be looked at again. With 2,000 groups and k = 50 that is a fortieth of the row.

A weight is exp(x - best) as an integer. Sums of integers do not depend on their order, so the result of a row does not
depend on the batch around it or on how its parts were added up. min_p, top_k and top_p are thresholds of keys and
weights, and of how many ties stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.compute.kernels.reference.sample import ALL_TIES
from quire.sampling_params import MIN_TEMPERATURE

CHUNK = 4_096
"""Logits that a program of the first pass reads."""
MAX_GROUPS = 2_048
_NARROWEST = 16
WEIGHT_SCALE = tl.constexpr(2.0**40)
"""The weight of the likeliest token. Tokens 2^-40 times as likely have no weight; 2^22 such weights fit in an int64."""
UNALIGNED_ARGUMENTS = ["slots", "temperature", "top_k", "top_p", "min_p", "seed", "drawn", "tokens", "faults", "last"]
"""Columns of which a kernel loads single entries: one compiled kernel serves them whatever their alignment."""
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class VocabTiling:
    """How a row of the vocabulary is divided.

    Attributes:
        group: Logits of a group.
        groups: The number of groups; the last one may be shorter.
        chunk: Logits of a chunk, a multiple of `group`.
        chunks: The number of chunks.
    """

    group: int
    groups: int
    chunk: int
    chunks: int

    @classmethod
    def of(cls, vocab: int, max_groups: int = MAX_GROUPS, chunk: int = CHUNK) -> VocabTiling:
        """Divide rows of this width into groups as narrow as `max_groups` allows."""
        group = min(chunk, max(_NARROWEST, triton.next_power_of_2(triton.cdiv(vocab, max_groups))))
        chunk = max(group, min(chunk, triton.next_power_of_2(vocab)))
        return cls(group, triton.cdiv(vocab, group), chunk, triton.cdiv(vocab, chunk))


def key_bits(dtype: torch.dtype) -> int:
    """Return how many leading bits tell logits of this dtype apart as fp32; all bits behind them are 0."""
    return {torch.bfloat16: 16, torch.float16: 19}.get(dtype, 32)


@triton.jit
def logit_to_key(x, BITS: tl.constexpr):
    """Return fp32 as int32 of the same order: NaN is the highest, and -0 is 0. With fewer BITS, x is of a narrower
    dtype."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, key) >> (32 - BITS)


@triton.jit
def key_to_logit(key, BITS: tl.constexpr):
    """Return the fp32 that has an int32 key."""
    if BITS < 32:
        key = (key << (32 - BITS)) | tl.where(key < 0, (1 << (32 - BITS)) - 1, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def lowest_key(BITS: tl.constexpr):
    """Return the key of places beyond a row's end, which is below the key of every number."""
    return -(2 ** (BITS - 1))


@triton.jit
def exp_weight(x, best, scale):
    """Return exp2((x - best) · scale) in units of 2^-40, int64; `best` is at least x, and finite."""
    return (tl.exp2((x - best) * scale) * WEIGHT_SCALE).to(tl.int64)


@triton.jit
def bisect_threshold(keys, units, low, high, base, aim):
    """Return the lowest key v within [low, high] for which base + Σ units of the keys above v < aim; true of `high`.

    `keys`: [n] int32. `units`, `base`, `aim`: weights, or 1 each to count; of one dtype. `low`, `high`: int64.
    """
    while low < high:
        middle = low + ((high - low) >> 1)
        less = base + tl.sum(tl.where(keys > middle.to(tl.int32), units, 0), 0) < aim
        low = tl.where(less, low, middle + 1)
        high = tl.where(less, middle, high)
    return high


@triton.jit
def rescaled_chunk_masses(bests, masses, best, scale, BITS: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_2: tl.constexpr):
    """Return [chunks] the weight of each chunk relative to the row's best token; `masses` are relative to the
    chunk's."""
    chunk = tl.arange(0, CHUNKS_2)
    own = key_to_logit(tl.load(bests + chunk, mask=chunk < CHUNKS, other=0), BITS)
    mass = tl.load(masses + chunk, mask=chunk < CHUNKS, other=0)
    beside = tl.exp2(tl.where(chunk < CHUNKS, own - best, float("-inf")) * scale)
    return (mass.to(tl.float64) * beside.to(tl.float64)).to(tl.int64)


LOWEST_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
KEEP_ALL_TIES = tl.constexpr(ALL_TIES)
ZERO_WEIGHT_LOG2 = tl.constexpr(41.0)
"""A weight this many powers of two below that of the likeliest token is 0."""


@triton.jit
def philox_number(seed, drawn):
    """Return the number in [0, 1) of (seed, drawn), as a fraction of 2^64: 53 bits, then zeros."""
    low, high = (drawn & 0xFFFFFFFF).to(tl.uint32), ((drawn >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    return ((first.to(tl.uint64) << 21) | (second >> 11).to(tl.uint64)) << 11


@triton.jit
def target_mass(number, total):
    """Return the share `number` of a total weight, rounded down: the token is the first beyond it."""
    return tl.umulhi(number, total.to(tl.uint64)).to(tl.int64)


@triton.jit
def min_p_floor(best, scale, likely, BITS: tl.constexpr, WRITE_THRESHOLDS: tl.constexpr):
    """Return the lowest key that min_p leaves, int64; unless thresholds are written, the key has a weight."""
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
    """Return what the weights of the likeliest must reach for top_p: a token stays if those before it weigh less."""
    return tl.maximum(tl.ceil(p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def num_ties_to_keep(missing, weight):
    """Return how many tokens of this weight add up to the `missing` weight."""
    return tl.where(weight > 0, (missing + weight - 1) // tl.maximum(weight, 1), KEEP_ALL_TIES)
