"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotate pairs (i, i + r/2) of each head's first r dimensions by its position's angles, and keep the rest (Su et
    al. 2021, in the half-split layout).

    Args:
        x: [tokens, heads, d].
        cos, sin: [tokens, r/2], of each token's position, in x's dtype.
        out: [tokens, heads, d], not x.
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
        x, out = x[..., :width], out[..., :width]
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [tokens, 1, d/2]
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
