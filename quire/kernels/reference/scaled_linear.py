"""Matrix products of 8-bit codes with scales: weight and activations both quantized."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.reference.activation import silu_and_mul

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest code, by dtype; int8 leaves -128 out."""
SMALLEST = 1e-20
"""What counts as the largest value of a row of zeros."""


class ScaledWeight(NamedTuple):
    """A weight as codes and scales: W[r, c] = codes[r, c] · scales[r // block rows, c // block columns].

    Attributes:
        codes: [outputs, columns] float8_e4m3fn or int8.
        scales: [outputs / block rows, columns / block columns], rounded up, fp32.
        block: Rows and columns that share a scale; (1, columns): each output has one.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    def dense(self) -> Tensor:
        """[outputs, columns] fp32."""
        outputs, columns = self.codes.shape
        scales = self.scales.repeat_interleave(self.block[0], 0)[:outputs]
        return self.codes.float() * scales.repeat_interleave(self.block[1], 1)[:, :columns]


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """Codes of x and their scales: x ≈ codes · scale, the largest value of a group being the largest code.

    Args:
        x: [rows, columns].
        dtype: One of LARGEST.
        group: Columns that share a scale; they need not divide all.

    Returns:
        [rows, columns] codes and [rows, groups] fp32 scales.
    """
    rows, columns = x.shape
    groups = -(-columns // group)
    padded = torch.nn.functional.pad(x.float(), (0, groups * group - columns)).view(rows, groups, group)
    scales = padded.abs().amax(-1).clamp_(min=SMALLEST) / LARGEST[dtype]
    codes = (padded / scales.unsqueeze(-1)).view(rows, -1)[:, :columns]
    if dtype == torch.int8:
        codes = codes.round()
    return codes.to(dtype), scales


def scaled_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias in x's dtype, where x is quantized as well: in groups of as many columns as share a scale of W.

    A version may leave x as it is where that is no slower.

    Args:
        x: [tokens, columns].
        bias: [outputs].
    """
    codes, scales = quantize_rows(x, weight.codes.dtype, weight.block[1])
    seen = codes.float() * scales.repeat_interleave(weight.block[1], 1)[:, : x.shape[1]]
    y = (seen @ weight.dense().T).to(x.dtype)
    return y if bias is None else y + bias


def scaled_linear_silu_and_mul(x: Tensor, weight: ScaledWeight, bias: Tensor | None, out: Tensor) -> None:
    """`scaled_linear`, and silu of the first half of its outputs times the second → out [tokens, outputs / 2]."""
    silu_and_mul(scaled_linear(x, weight, bias), out)
