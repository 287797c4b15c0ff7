"""Rotary position embedding, and its frequencies where they depend on a sequence's length."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, interleaved: bool = False) -> None:
    """Rotate pairs (i, i + r/2) of each head's first r dimensions by its position's angles (Su et al. 2021,
    half-split), or pairs (2i, 2i + 1) if they are interleaved.

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
    (first, second), (out_first, out_second) = (
        (each[..., ::2], each[..., 1::2]) if interleaved else each.chunk(2, dim=-1) for each in (x, out)
    )
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [tokens, 1, d/2]
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)


def query_scales(positions: Tensor, growth: float, length: int, first: int, out: Tensor) -> None:
    """Compute factors of queries that grow with their positions: 1 + growth · ln(1 + ⌊(position + first) / length⌋)
    (Nakanishi 2025, "Scalable-Softmax", as Llama 4 does it).

    Args:
        positions: [tokens] int64.
        growth: The factor of the logarithm.
        length: The number of positions with equal factors.
        first: The number of the first position.
        out: [tokens] fp32.
    """
    steps = torch.div(positions + first, length, rounding_mode="floor")
    out.copy_(1 + growth * torch.log1p(steps.float()))


def sequence_lengths(least: Tensor, slots: Tensor, positions: Tensor, out: Tensor) -> None:
    """Write the sequence length that each token counts with: its slot's minimum, or more if the token is beyond it.

    Args:
        least: [slots] int64, the minimum lengths.
        slots, positions: [tokens] int64, each token's.
        out: [tokens] int64.
    """
    torch.maximum(least.index_select(0, slots), positions + 1, out=out)


def shifted_positions(shifts: Tensor, slots: Tensor, positions: Tensor, out: Tensor) -> None:
    """Write the position that each token counts as behind images, which take fewer positions than they have tokens.

    Args:
        shifts: [slots] int64, what is added to positions.
        slots, positions: [tokens] int64, each token's.
        out: [tokens] int64.
    """
    torch.add(positions, shifts.index_select(0, slots), out=out)


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
