"""Which keys a query sees: the one place where attention kernels find it. It is always one range of positions.

A kernel gets the reference's `Mask` as `window`, which may be any number where WINDOWED is False.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def visible_range(first, end, window, WINDOWED: tl.constexpr):
    """The keys that queries at positions `first` to `end` - 1 see together: where they begin and end.

    With tensors it is one range for each of their elements.
    """
    if WINDOWED:
        begin = tl.maximum(first + 1 - window, 0)
    else:
        begin = 0
    return begin, end


@triton.jit
def tile_mask(key, begin, end, WINDOWED: tl.constexpr):
    """Which keys are seen, by their positions, of a visible range from `begin` to `end`. Without a window, all begin at
    0."""
    seen = key < end
    if WINDOWED:
        seen &= key >= begin
    return seen
