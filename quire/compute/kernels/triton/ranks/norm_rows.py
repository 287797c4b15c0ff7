"""What kernels that add up rows over ranks do with a sum: add it to the residual stream, norm that and store both.

Values are those of the sum as `pushed.py` and `pulled.py` round it and of `rms_norm` or `rms_norm_quantized` behind it;
only the squares of a row are added in another order. A thread has words of 4 bytes: an fp32 each, or two values of
16 bits, of which the lower one stands before the upper.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.launch import next_power_of_2
from quire.compute.kernels.triton.linear.quantize_rows import row_scales
from quire.compute.kernels.triton.ranks.pushed import add_words, joined
from quire.compute.kernels.triton.ranks.window import STEP_BYTES


def serves_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels norm rows like these: contiguous ones of whole words, not too wide, with a weight of their
    dtype.
    """
    size = x.shape[-1] * x.element_size()
    is_plain = x.dim() == 2 and x.is_contiguous() and weight.dim() == 1 and weight.dtype == x.dtype
    return is_plain and size % 4 == 0 and 4 * block_of(size // 4) <= STEP_BYTES


def words_of(x: Tensor) -> int:
    """Of a row."""
    return x.shape[1] * x.element_size() // 4


def block_of(words: int) -> int:
    """Of a row with so many words, with what pads it: at least a word for each thread of a warp."""
    return max(32, next_power_of_2(words))


@triton.jit
def words_at(x):
    """A tensor's address, as that of words."""
    return x.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """fp32 values as the stream's dtype has them."""
    if dtype != tl.float32:
        values = values.to(dtype).to(tl.float32)
    return values


@triton.jit
def added_to(kept, low, high, dtype: tl.constexpr):
    """The stream's values once the sum is added, and their squares, two by two.

    Args:
        kept: Words of the stream.
        low, high: Of the sum, see add_words.
    """
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
        shrink: What values are multiplied by: 1 / their root mean square.
        out: Rows of the stream's dtype, or codes.
        scales: By row; None: out has no codes.
        rows, row_inside: Of scales.
        at, inside: Where words are in out.
        AXIS: That of a row; None: all is one row.
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
            # Both of a word are converted together. A thread's codes of two words would be converted as a pair too, and
            # pulled apart: ptxas 12.8, which Triton 3.6 has, takes the second one before it is there.
            first, second = tl.split(_codes(tl.join(low * by, high * by), out.dtype.element_ty, ROUND))
            both = first | (second << 8)
            tl.store(out.to(tl.pointer_type(tl.int16), bitcast=True) + at, both.to(tl.int16), inside)
        tl.store(scales + rows, scale, row_inside)


@triton.jit
def _codes(values, CODE: tl.constexpr, ROUND: tl.constexpr):
    """The bits of codes, each in a word of zeros."""
    if ROUND:
        values = (values + 12582912.0) - 12582912.0  # to the nearest integer, even at halves: 1.5 · 2^23
    return values.to(CODE).to(tl.int8, bitcast=True).to(tl.int32) & 0xFF
