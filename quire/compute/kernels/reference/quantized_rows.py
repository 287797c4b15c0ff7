"""Rows of activations as 8-bit codes, and norms that make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.compute.kernels.reference.norm import rms_norm

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""The largest code of rows, weights and KV caches, by dtype; int8 leaves -128 out."""
SMALLEST = 1e-20
"""Stands for the largest value of a row of zeros."""


class QuantizedRows(NamedTuple):
    """Rows as codes and scales: x[r, c] ≈ codes[r, c] · scales[r].

    Attributes:
        codes: [rows, columns] float8_e4m3fn or int8.
        scales: [rows, 1] fp32.
        dtype: The dtype of what they stand for, and of a product with them.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def new_empty(self, shape: tuple[int, ...]) -> Tensor:
        """Allocate a dense tensor of the rows' dtype and device."""
        return torch.empty(shape, dtype=self.dtype, device=self.codes.device)


class UnnormedRow:
    """A row whose norm is left to the product that reads it, and the sum before that norm.

    The first product that reads it makes `stream` and `normed`, in a kernel of its own or after the usual one.

    Args:
        x: [1, columns], what is normed.
        delta: [1, columns], what is added to x first; None: nothing is.
        weight: [columns], the norm's.
        eps: Added to the mean square.

    Attributes:
        stream: [1, columns], x + delta, once the row is read.
        normed: [1, columns], the norm of x + delta, once the row is read.
    """

    def __init__(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> None:
        self.x, self.delta, self.weight, self.eps = x, delta, weight, eps
        self.stream = x
        self.normed: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def new_empty(self, shape: tuple[int, ...]) -> Tensor:
        """Allocate a dense tensor of the row's dtype and device."""
        return self.x.new_empty(shape)

    def dense(self, norm: Callable[..., None] = rms_norm) -> Tensor:
        """Return the norm; if no product has made it, `norm` does, the op `rms_norm`, and adds delta to x in place."""
        if self.normed is None:
            self.normed = torch.empty_like(self.x)
            norm(self.x, self.weight, self.eps, self.normed, self.delta)
        return self.normed


NormedRows: TypeAlias = "Tensor | QuantizedRows"  # as text: compiler processes have no torch
"""An operand [rows, columns] of a product."""
Rows: TypeAlias = "NormedRows | UnnormedRow"
"""What a layer reads, [rows, columns]."""


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """Quantize x [rows, columns] to codes of a dtype of LARGEST: x ≈ codes · scale.

    Each `group` of columns, which need not divide them, shares a scale, by which its largest value is the largest code.

    Returns:
        [rows, columns] codes and [rows, groups] fp32 scales.
    """
    rows, columns = x.shape
    groups = -(-columns // group)
    padded = torch.nn.functional.pad(x.float(), (0, groups * group - columns)).view(rows, groups, group)
    scales = padded.abs().amax(-1).clamp_(min=SMALLEST) / LARGEST[dtype]
    codes = (padded / scales.unsqueeze(-1)).view(rows, groups * group)[:, :columns]
    if dtype == torch.int8:
        codes = codes.round()
    return codes.to(dtype), scales


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, delta: Tensor | None = None
) -> QuantizedRows:
    """Compute `rms_norm` of x [rows, width], and quantize the result row by row."""
    out = torch.empty_like(x)
    rms_norm(x, weight, eps, out, delta)
    return QuantizedRows(*quantize_rows(out, dtype, out.shape[1]), x.dtype)
