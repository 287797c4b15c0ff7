"""Says which keys a query sees, for all attention kernels: always one range of positions.

A kernel gets the reference's `Mask` as a kind, one of the constants below, and a size, which may be any number for
CAUSAL.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.compute.kernels.reference.attention_inputs import Mask

CAUSAL, WINDOW, CHUNK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def mask_arguments(mask: Mask) -> tuple[int, int]:
    """Return the kind and the size of a mask: the tokens of its window, or of its chunks."""
    if mask.chunk is not None:
        return CHUNK.value, mask.chunk
    return (CAUSAL.value, 0) if mask.window is None else (WINDOW.value, mask.window)


@triton.jit
def visible_range(first, end, size, KIND: tl.constexpr):
    """Return the begin and end of the keys that queries at positions `first` to `end` - 1 see together.

    With tensors, there is one range for each of their elements.
    """
    if KIND == WINDOW:
        begin = tl.maximum(first + 1 - size, 0)
    elif KIND == CHUNK:
        begin = first // size * size
    else:
        begin = 0
    return begin, end


@triton.jit
def tile_mask(key, begin, end, KIND: tl.constexpr):
    """Whether keys at these positions are in a visible range from `begin` to `end`; the ranges of causal masks begin at
    0."""
    seen = key < end
    if KIND != CAUSAL:
        seen &= key >= begin
    return seen
