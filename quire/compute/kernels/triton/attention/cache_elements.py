"""Elements of a quantized KV cache in a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Elements of a cache as numbers of the products' dtype, which holds each of them exactly."""
    if x.dtype == tl.int8:
        return x.to(tl.float32).to(dtype)
    return x.to(dtype)
