"""Matrix products of 8-bit codes with scales: weight and activations both quantized."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from quire.compute.kernels.reference.activation import silu_and_mul
from quire.compute.kernels.reference.quantized_rows import QuantizedRows, Rows, quantize_rows


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


def pack_scaled(weight: ScaledWeight) -> ScaledWeight:
    """The weight as `scaled_linear` wants it."""
    return weight


def scaled_linear(x: Rows, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias in x's dtype, where x is quantized as well: in groups of as many columns as share a scale of W.

    A version may leave x as it is where that is no slower.

    Args:
        x: [tokens, columns]; quantized already only where each output of W has one scale.
        bias: [outputs].
    """
    if isinstance(x, QuantizedRows):
        codes, scales = x.codes, x.scales
    else:
        codes, scales = quantize_rows(x, weight.codes.dtype, weight.block[1])
    seen = codes.float() * scales.repeat_interleave(weight.block[1], 1)[:, : x.shape[1]]
    y = (seen @ weight.dense().T).to(x.dtype)
    return y if bias is None else y + bias


def scaled_linear_silu_and_mul(x: Rows, weight: ScaledWeight, bias: Tensor | None, out: Tensor) -> None:
    """`scaled_linear`, and silu of the first half of its outputs times the second → out [tokens, outputs / 2]."""
    silu_and_mul(scaled_linear(x, weight, bias), out)
