"""What a step begins with: the embeddings of its tokens and the angles of their positions."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_tied(weight: Tensor) -> Tensor:
    """Return the weight [vocab_size, width] as both `embed` and `linear` take it; here unchanged."""
    return weight


def embed(tokens: Tensor, weight: Tensor, scale: float | None, out: Tensor) -> None:
    """out = weight[tokens] · scale: tokens [n] int64, weight [vocab_size, width] → out [n, width].

    The scale is a value of the weight's dtype; None: 1.
    """
    torch.index_select(weight, 0, tokens, out=out)
    if scale is not None:
        out.mul_(scale)


def local_indices(indices: Tensor, first: int, count: int, out: Tensor) -> None:
    """Turn indices [n] int64 into a whole (the vocabulary, a layer's experts) into indices of a part → out [n] int64.

    The part has the entries `first` to `first + count - 1`; entries of other parts become `count`.
    """
    local = indices - first
    out.copy_(torch.where((local >= 0) & (local < count), local, count))


def take_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """out = x[rows]: x [n, width], rows [m] int64 → out [m, width] of x's dtype."""
    torch.index_select(x, 0, rows, out=out)


def angles(positions: Tensor, frequencies: Tensor, scale: float, cos: Tensor, sin: Tensor) -> None:
    """Compute cosine and sine of position · frequency, times the scale, in fp32 until they are stored (Su et al. 2021).

    Args:
        positions: [tokens] int64.
        frequencies: [width / 2] fp32, radians a position; or [tokens, width / 2], each token's own.
        scale: Multiplies cosines and sines, as `quire.models.rope.angle_scale` explains.
        cos, sin: [tokens, width / 2] out, of one floating dtype.
    """
    turned = positions.to(torch.float32).unsqueeze(1) * frequencies
    torch.mul(turned.cos(), scale, out=cos)
    torch.mul(turned.sin(), scale, out=sin)
