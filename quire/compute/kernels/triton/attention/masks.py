"""Says which keys a query sees, for all attention kernels: always one range of positions.

A kernel gets the reference's `Mask` as a kind, one of the constants below, and a size, which may be any number for
CAUSAL and BOTH_SIDES.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.compute.kernels.reference.attention_inputs import Mask

BOTH_SIDES, CAUSAL = tl.constexpr(-1), tl.constexpr(0)
WINDOW, CHUNK, WINDOW_TO_BOTH_SIDES = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Kinds of masks. Only ranges of kinds above CAUSAL begin elsewhere than at 0."""


def mask_arguments(mask: Mask) -> tuple[int, int]:
    """Return the kind and the size of a mask: the tokens of its window, or of its chunks."""
    if mask.chunk is not None:
        return CHUNK.value, mask.chunk
    if mask.window is None:
        return BOTH_SIDES.value if mask.two_sided else CAUSAL.value, 0
    return WINDOW_TO_BOTH_SIDES.value if mask.two_sided else WINDOW.value, mask.window


@triton.jit
def visible_range(first, end, length, size, KIND: tl.constexpr):
    """Return the begin and end of the keys that queries at positions `first` to `end` - 1 see together, of a row that
    has `length` keys.

    With tensors, there is one range for each of their elements.
    """
    if KIND == WINDOW_TO_BOTH_SIDES:
        end = tl.minimum(end - 1 + size, length)
    elif KIND == BOTH_SIDES:
        end = end * 0 + length
    if KIND == CHUNK:
        begin = first // size * size
    elif KIND > CAUSAL:
        begin = tl.maximum(first + 1 - size, 0)
    else:
        begin = 0
    return begin, end


@triton.jit
def tile_mask(key, begin, end, KIND: tl.constexpr):
    """Whether keys at these positions are in a visible range from `begin` to `end`."""
    seen = key < end
    if KIND > CAUSAL:
        seen &= key >= begin
    return seen
