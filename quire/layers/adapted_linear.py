"""A matrix product of which some rows have a low-rank update, around whatever scheme its weight has."""

from __future__ import annotations

from torch import Tensor

from quire.collectives.delta import total_of
from quire.kernels.reference.quantized_rows import Rows
from quire.layers.linear import Linear
from quire.lora.updates import LowRankUpdate, PendingUpdate
from quire.quantization.scheme import RowForm


class AdaptedLinear:
    """x Wᵀ + b, and B A x for rows of tokens with adapters; see Linear.

    Args:
        base: x Wᵀ + b.
        update: B A x.

    Attributes:
        row_form: None: A is multiplied by dense rows.
    """

    row_form: RowForm | None = None

    def __init__(self, base: Linear, update: LowRankUpdate) -> None:
        self._base = base
        self._update = update

    def __call__(self, x: Rows) -> Tensor:
        """[tokens, columns] → [tokens, outputs]."""
        return total_of(self.pending(x))

    def pending(self, x: Rows) -> Tensor | PendingUpdate:
        """See Projection."""
        if not self._update.active:
            return self._base(x)
        assert isinstance(x, Tensor)
        y, low = self._base.multiply_and_shrink(x, self._update)
        return PendingUpdate(self._update, low, y)

    def silu_and_mul(self, x: Rows) -> Tensor:
        """[tokens, columns] → [tokens, half of the rows], see Linear."""
        if not self._update.active:
            return self._base.silu_and_mul(x)
        assert isinstance(x, Tensor)
        y, low = self._base.multiply_and_shrink(x, self._update)
        return self._update.expand_silu_and_mul(low, y)
