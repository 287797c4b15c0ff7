"""softplus as the recurrent ops need it: exact also far below 0, where step sizes and decays are small."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)), in fp32."""
    e = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(e < 1e-3, e * (1.0 - 0.5 * e), tl.log(1.0 + e)))
