"""B A x on its way from the programs that make it to those that add it, in one launch.

It lies in memory of the product's dtype. What is not there yet has all bits set, which no number has. So each element
says itself whether it is there: who adds it asks until it is, and then sets its bits again for the next launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING_YET = tl.constexpr(-1)
"""As a signed integer."""


@triton.jit
def hand_over(at, values, mask):
    """Store values for whoever adds them, at pointers to integers as wide as the product's dtype, which values have."""
    bits = values.to(at.dtype.element_ty, bitcast=True)
    tl.store(at, tl.where(bits == NOTHING_YET, NOTHING_YET - 1, bits), mask)


@triton.jit
def updated_gates_and_ups(
    gate,
    up,
    update,
    row,
    begin,
    output,
    slot,
    inside,
    outputs,
    factors,
    summands,
    scaled,
    scaling_stride,
    scaled_stride,
    DTYPE: tl.constexpr,
):
    """A product's sums of gates and of ups, [rows, outputs] fp32 each, as their adapters scale them, if they do, plus B
    A x.

    Args:
        update: Where B A x is, or will be: integers as wide as DTYPE, [rows, 2 · outputs], ups behind the gates.
        row, output: The tile's; `begin` is the first output.
        slot: [rows], each one's adapter, from 1; 0: it has none.
        inside: [rows, outputs], what there is of the tile.
        outputs: How many gates there are.
        factors, summands, scaled: See reference/lora.py's Scaling; None: nothing is scaled.
        DTYPE: Of the product.
    """
    changed = inside & (slot > 0)[:, None]
    rows = update + row * (2 * outputs)
    at = rows[:, None] + output[None, :]
    gate_bits = tl.load(at, changed, 0, volatile=True)
    up_bits = tl.load(at + outputs, changed, 0, volatile=True)
    gate = _scaled(gate, slot, output, changed, factors, summands, scaled, scaling_stride, scaled_stride)
    up = _scaled(up, slot, output + outputs, changed, factors, summands, scaled, scaling_stride, scaled_stride)
    gate += _taken(gate_bits, at, rows + begin, slot > 0, changed, DTYPE)
    up += _taken(up_bits, at + outputs, rows + begin + outputs, slot > 0, changed, DTYPE)
    return gate, up


@triton.jit
def _scaled(sums, slot, output, changed, factors, summands, scaled, scaling_stride, scaled_stride):
    if scaled is not None:
        flags = tl.load(scaled + (slot - 1) * scaled_stride, slot > 0, 0)
        if tl.max(flags, 0) > 0:
            its = ((slot - 1) * scaling_stride)[:, None] + output[None, :]
            scales = changed & (flags > 0)[:, None]
            factor = tl.load(factors + its, scales, 0.0).to(tl.float32)
            sums += sums * factor + tl.load(summands + its, scales, 0.0).to(tl.float32)
    return sums


@triton.jit
def _taken(bits, at, first, has, changed, DTYPE: tl.constexpr):
    """What is handed over at these pointers [rows, outputs], fp32, 0 where nothing changes, and nothing is left there.
    While it is not there the rows that have any ask for their first output alone: many programs wait at once."""
    while tl.max(tl.max((bits == NOTHING_YET).to(tl.int32), 1), 0) > 0:
        head = tl.load(first, has, 0, volatile=True)
        while tl.max((head == NOTHING_YET).to(tl.int32), 0) > 0:
            head = tl.load(first, has, 0, volatile=True)
        bits = tl.load(at, changed, 0, volatile=True)
    tl.store(at, tl.full(at.shape, NOTHING_YET, at.dtype.element_ty), changed)
    return bits.to(DTYPE, bitcast=True).to(tl.float32)
