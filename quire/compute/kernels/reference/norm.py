"""Root mean square norm and layer norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, delta: Tensor | None = None) -> None:
    """out = x / sqrt(mean(x²) + eps) · weight, after x += delta (Zhang & Sennrich 2019, eq. 4).

    Args:
        x: [tokens, …, width], the residual stream; changed in place where there is a delta.
        weight: [width], or [heads, width] for as many norms at once.
        eps: Added to the mean square.
        out: [tokens, …, width], not x.
        delta: [tokens, …, width], what the last block adds to the stream.

    All have one floating dtype, but the weight may be in fp32: then it is applied before the result is rounded. The
    mean is computed in fp32.
    """
    if delta is not None:
        x.add_(delta)
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # [tokens, 1]
    norm = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    if weight.dtype == out.dtype:
        torch.mul(wide, norm, out=out)
        out.mul_(weight)
    else:
        out.copy_(wide.mul_(norm).mul_(weight))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, delta: Tensor | None = None) -> None:
    """out = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias, after x += delta (Ba, Kiros, Hinton 2016).

    Args:
        x: [tokens, width], the residual stream; changed in place where there is a delta.
        weight, bias: [width].
        eps: Added to the variance.
        out: [tokens, width]; not x.
        delta: [tokens, width], what the last block adds to the stream.
    """
    if delta is not None:
        x.add_(delta)
    out.copy_(F.layer_norm(x, weight.shape, weight, bias, eps))
