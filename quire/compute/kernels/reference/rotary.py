"""Rotary position embedding, and its frequencies where they depend on a sequence's length."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotate pairs (i, i + r/2) of each head's first r dimensions by its position's angles (Su et al. 2021,
    half-split).

    The other dimensions are kept.

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


def sequence_lengths(least: Tensor, slots: Tensor, positions: Tensor, out: Tensor) -> None:
    """Write the sequence length that each token counts with: its slot's minimum, or more if the token is beyond it.

    Args:
        least: [slots] int64, the minimum lengths.
        slots, positions: [tokens] int64, each token's.
        out: [tokens] int64.
    """
    torch.maximum(least.index_select(0, slots), positions + 1, out=out)


def choose_frequencies(lengths: Tensor, both: Tensor, original: int, out: Tensor) -> None:
    """Choose one of two lists of frequencies for each token (LongRoPE, Ding et al. 2024).

    Args:
        lengths: [tokens] int64.
        both: [2, width / 2] fp32; the second is for sequences longer than `original` tokens.
        original: The original length, in tokens.
        out: [tokens, width / 2] fp32.
    """
    out.copy_(both[(lengths > original).long()])


def grow_frequencies(lengths: Tensor, theta: float, factor: float, original: int, out: Tensor) -> None:
    """Compute frequencies whose base grows with sequences beyond the original length (dynamic NTK, bloc97 2023).

    Args:
        lengths: [tokens] int64.
        theta: The base up to the original length.
        factor: How much longer sequences may become.
        original: The original length, in tokens.
        out: [tokens, width / 2] fp32.
    """
    width = 2 * out.shape[1]
    growth = factor * lengths.clamp(min=original).float() / original - (factor - 1)
    base = theta * growth ** (width / (width - 2))
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=lengths.device) / width
    out.copy_(1.0 / base.unsqueeze(1) ** exponents)
