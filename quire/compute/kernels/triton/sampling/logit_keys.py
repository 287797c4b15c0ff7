"""Logits as integers of the same order, and the groups by which the highest of a row are found without sorting it.

A row is read once and each group of it (16 to 256 neighbours) leaves its highest key. The k-th highest of these is a
floor under the k highest logits of the row: at least k of them lie on it or above, and only the groups that reach it
need to be looked at again. With 2,000 groups and k = 50 that is a fortieth of the row.

A weight is exp(x - best) as an integer. Sums of integers do not depend on their order, so a row's outcome does not
depend on the batch around it or on how its parts were added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHUNK = 4_096
"""Logits that a program of the first pass reads."""
MAX_GROUPS = 2_048
_NARROWEST = 16
WEIGHT_SCALE = tl.constexpr(2.0**40)
"""Weight of the likeliest token. One of 2^-40 of it counts nothing; 2^22 of them fit in an int64."""
UNALIGNED_ARGUMENTS = ["slots", "temperature", "top_k", "top_p", "min_p", "seed", "drawn", "tokens", "faults", "last"]
"""Columns of which a kernel loads single entries: wherever they begin, one compiled kernel serves."""
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class VocabTiling:
    """How a row of the vocabulary is divided.

    Attributes:
        group: Logits of a group.
        groups: How many there are; the last may be cut short.
        chunk: Logits of a chunk, a multiple of `group`.
        chunks: How many there are.
    """

    group: int
    groups: int
    chunk: int
    chunks: int

    @classmethod
    def of(cls, vocab: int, max_groups: int = MAX_GROUPS, chunk: int = CHUNK) -> VocabTiling:
        """For rows of this width: groups as narrow as their number allows."""
        group = min(chunk, max(_NARROWEST, triton.next_power_of_2(triton.cdiv(vocab, max_groups))))
        chunk = max(group, min(chunk, triton.next_power_of_2(vocab)))
        return cls(group, triton.cdiv(vocab, group), chunk, triton.cdiv(vocab, chunk))


def key_bits(dtype: torch.dtype) -> int:
    """Bits that tell logits of this dtype apart, as fp32: all behind them are 0."""
    return {torch.bfloat16: 16, torch.float16: 19}.get(dtype, 32)


@triton.jit
def logit_to_key(x, BITS: tl.constexpr):
    """fp32 → int32 of the same order; NaN is the highest, and -0 is 0. With fewer bits, x is of a narrower dtype."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, key) >> (32 - BITS)


@triton.jit
def key_to_logit(key, BITS: tl.constexpr):
    """int32 key → the fp32 that has it."""
    if BITS < 32:
        key = (key << (32 - BITS)) | tl.where(key < 0, (1 << (32 - BITS)) - 1, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def lowest_key(BITS: tl.constexpr):
    """Below the key of every number: that of places beyond a row's end."""
    return -(2 ** (BITS - 1))


@triton.jit
def exp_weight(x, best, scale):
    """exp2((x - best) · scale) in units of 2^-40, an int64; `best` is at least x, and finite."""
    return (tl.exp2((x - best) * scale) * WEIGHT_SCALE).to(tl.int64)


@triton.jit
def bisect_threshold(keys, units, low, high, base, aim):
    """The lowest key v within [low, high] for which base + Σ units of the keys above v < aim; true of `high`.

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
    """[chunks] weight of each chunk beside the row's best token, which they were not made beside."""
    chunk = tl.arange(0, CHUNKS_2)
    own = key_to_logit(tl.load(bests + chunk, mask=chunk < CHUNKS, other=0), BITS)
    mass = tl.load(masses + chunk, mask=chunk < CHUNKS, other=0)
    beside = tl.exp2(tl.where(chunk < CHUNKS, own - best, float("-inf")) * scale)
    return (mass.to(tl.float64) * beside.to(tl.float64)).to(tl.int64)
