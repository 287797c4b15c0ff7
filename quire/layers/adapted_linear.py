"""A matrix product of which some rows have a low-rank update, around whatever scheme its weight has."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.kernels.reference.quantized_rows import Rows
from quire.layers.linear import Linear
from quire.lora.updates import LowRankUpdate
from quire.quantization.scheme import RowForm


class AdaptedLinear:
    """x Wᵀ + b, and B A x for rows of tokens with adapters; see Linear.

    Args:
        base: x Wᵀ + b.
        update: B A x.
        device: The type of the device that computes.

    Attributes:
        row_form: None: A is multiplied by dense rows.
    """

    row_form: RowForm | None = None

    def __init__(self, base: Linear, update: LowRankUpdate, device: str) -> None:
        self._base = base
        self._update = update
        self._silu_and_mul = kernel("silu_and_mul", device)

    def __call__(self, x: Rows) -> Tensor:
        """[tokens, columns] → [tokens, outputs]."""
        if not self._update.active:
            return self._base(x)
        assert isinstance(x, Tensor)
        low = self._update.shrink(x)
        y = self._base.behind(x)
        self._update.expand(low, y)
        return y

    def silu_and_mul(self, x: Rows) -> Tensor:
        """[tokens, columns] → [tokens, half of the rows], see Linear; in two passes where anything is added between."""
        if not self._update.active:
            return self._base.silu_and_mul(x)
        y = self(x)
        out = y.new_empty((y.shape[0], y.shape[1] // 2))
        self._silu_and_mul(y, out)
        return out
