"""Says which keys a query sees, for all attention kernels: always one range of positions.

A kernel gets the reference's `Mask` as `window`, which may be any number where WINDOWED is False.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def visible_range(first, end, window, WINDOWED: tl.constexpr):
    """Return the begin and end of the keys that queries at positions `first` to `end` - 1 see together.

    With tensors, there is one range for each of their elements.
    """
    if WINDOWED:
        begin = tl.maximum(first + 1 - window, 0)
    else:
        begin = 0
    return begin, end


@triton.jit
def tile_mask(key, begin, end, WINDOWED: tl.constexpr):
    """Whether keys at these positions are in a visible range from `begin` to `end`; without a window, ranges begin at
    0."""
    seen = key < end
    if WINDOWED:
        seen &= key >= begin
    return seen
