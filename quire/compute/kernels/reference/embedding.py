"""What a step begins with: the embeddings of its tokens and the angles of their positions."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_tied(weight: Tensor) -> Tensor:
    """The weight [vocab_size, width] as both `embed` and `linear` take it; here as it is."""
    return weight


def embed(tokens: Tensor, weight: Tensor, scale: float | None, out: Tensor) -> None:
    """out = the weight's rows of these tokens, times the scale.

    Args:
        tokens: [tokens] int64.
        weight: [vocab_size, width].
        scale: As the weight's dtype has it; None: 1.
        out: [tokens, width], of the same dtype.
    """
    torch.index_select(weight, 0, tokens, out=out)
    if scale is not None:
        out.mul_(scale)


def local_indices(indices: Tensor, first: int, count: int, out: Tensor) -> None:
    """out = where in a part of something (the vocabulary, a layer's experts) each entry of the whole is.

    Args:
        indices: [n] int64, of the whole.
        first, count: The part has the entries `first` to `first + count - 1`.
        out: [n] int64, from 0 on; `count` for entries of other parts.
    """
    local = indices - first
    out.copy_(torch.where((local >= 0) & (local < count), local, count))


def take_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """out = x[rows].

    Args:
        x: [n, width].
        rows: [m] int64.
        out: [m, width], of the same dtype.
    """
    torch.index_select(x, 0, rows, out=out)


def angles(positions: Tensor, frequencies: Tensor, scale: float, cos: Tensor, sin: Tensor) -> None:
    """Cosine and sine of position · frequency, times the scale, all in fp32 until they are stored (Su et al. 2021).

    Args:
        positions: [tokens] int64.
        frequencies: [width / 2] fp32, radians a position; or each token's own: [tokens, width / 2].
        scale: See `quire.models.rope.angle_scale`.
        cos, sin: [tokens, width / 2] out, of one floating dtype.
    """
    turned = positions.to(torch.float32).unsqueeze(1) * frequencies
    torch.mul(turned.cos(), scale, out=cos)
    torch.mul(turned.sin(), scale, out=sin)
