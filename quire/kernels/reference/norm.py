"""Root mean square norm."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, delta: Tensor | None = None) -> None:
    """out = x / sqrt(mean(x²) + eps) · weight, after x += delta (Zhang & Sennrich 2019, eq. 4).

    Args:
        x: [tokens, width], the residual stream; changed in place where there is a delta.
        weight: [width].
        eps: Added to the mean square.
        out: [tokens, width]; not x.
        delta: [tokens, width], what the last block adds to the stream.

    All of one floating dtype; the mean is taken in fp32.
    """
    if delta is not None:
        x.add_(delta)
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # [tokens, 1]
    torch.mul(wide, norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_(), out=out)
    out.mul_(weight)
