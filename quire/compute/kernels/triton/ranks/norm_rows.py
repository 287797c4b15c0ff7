"""Adds a sum over ranks to the residual stream, norms the stream and stores both.

Values are those of the sum, as `pushed.py` and `pulled.py` round it, followed by `rms_norm` or `rms_norm_quantized`;
only the squares of a row are added in another order. A thread has words of 4 bytes: an fp32 each, or two 16-bit values,
of which the lower one stands before the upper.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.launch import next_power_of_2
from quire.compute.kernels.triton.norm import row_scales
from quire.compute.kernels.triton.ranks.pushed import add_words, joined
from quire.compute.kernels.triton.ranks.window import STEP_BYTES


def serves_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels norm rows of x: contiguous, of whole words, not too wide, with a weight of their dtype."""
    size = x.shape[-1] * x.element_size()
    is_plain = x.dim() == 2 and x.is_contiguous() and weight.dim() == 1 and weight.dtype == x.dtype
    return is_plain and size % 4 == 0 and 4 * block_of(size // 4) <= STEP_BYTES


def words_of(x: Tensor) -> int:
    return x.shape[1] * x.element_size() // 4


def block_of(words: int) -> int:
    """Return the words of a row with padding: at least one for each thread of a warp."""
    return max(32, next_power_of_2(words))


@triton.jit
def words_at(x):
    """Return a tensor's address as an address of words."""
    return x.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """Return fp32 values rounded to the stream's dtype."""
    if dtype != tl.float32:
        values = values.to(dtype).to(tl.float32)
    return values


@triton.jit
def added_to(kept, low, high, dtype: tl.constexpr):
    """Return the stream's values, words `kept` plus the sum (low, high: see add_words), and their squares, two by
    two."""
    low, high = add_words(rounded(low, dtype), rounded(high, dtype), kept, dtype)
    low, high = rounded(low, dtype), rounded(high, dtype)
    return low, high, low * low + high * high


@triton.jit
def store_normed(
    low, high, weights, shrink, out, scales, rows, row_inside, at, inside, largest, smallest,
    dtype: tl.constexpr, ROUND: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Store the norm's values, or their codes and scales.

    Args:
        low, high: Values of the stream.
        weights: Words of the norm's weight.
        shrink: 1 / the root mean square of the values, which multiplies them.
        out: Rows of the stream's dtype, or codes.
        scales: The scales of rows; None: out has no codes.
        rows, row_inside: The places of scales, and whether there are such rows.
        at, inside: The places of words in out, and whether there are such words.
        AXIS: The axis of a row; None: all values are one row.
    """
    w_low, w_high = add_words(tl.zeros_like(low), tl.zeros_like(high), weights, dtype)
    low = rounded(rounded(low * shrink, dtype) * w_low, dtype)
    high = rounded(rounded(high * shrink, dtype) * w_high, dtype)
    if scales is None:
        tl.store(words_at(out) + at, joined(low, high, dtype), inside)
    else:
        sign = 0x7FFFFFFF
        larger = tl.maximum(low.to(tl.int32, bitcast=True) & sign, high.to(tl.int32, bitcast=True) & sign)
        scale, by = row_scales(larger.to(tl.float32, bitcast=True), largest, smallest, AXIS)
        if AXIS is not None:
            by = by[:, None]
        if dtype == tl.float32:
            codes = _codes(low * by, out.dtype.element_ty, ROUND)
            tl.store(out.to(tl.pointer_type(tl.int8), bitcast=True) + at, codes.to(tl.int8), inside)
        else:
            # Both codes of a word are converted together. Codes of two words would be converted as a pair and pulled
            # apart, where ptxas 12.8, which Triton 3.6 has, takes the second one before it is there.
            first, second = tl.split(_codes(tl.join(low * by, high * by), out.dtype.element_ty, ROUND))
            both = first | (second << 8)
            tl.store(out.to(tl.pointer_type(tl.int16), bitcast=True) + at, both.to(tl.int16), inside)
        tl.store(scales + rows, scale, row_inside)


@triton.jit
def _codes(values, CODE: tl.constexpr, ROUND: tl.constexpr):
    """Return the bits of codes, each in a word of zeros."""
    if ROUND:
        values = (values + 12582912.0) - 12582912.0  # to the nearest integer, even at halves: 1.5 · 2^23
    return values.to(CODE).to(tl.int8, bitcast=True).to(tl.int32) & 0xFF
