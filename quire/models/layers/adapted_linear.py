"""A matrix product of which some rows have a low-rank update, around whatever scheme its weight has."""

from __future__ import annotations

from torch import Tensor

from quire.compute.collectives.delta import total_of
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.layers.linear import Linear
from quire.models.lora.updates import LowRankUpdate, PendingUpdate
from quire.models.quantization.scheme import RowForm


class AdaptedLinear:
    """A Projection that adds B A x to the rows x Wᵀ + b of tokens with adapters.

    Args:
        base: Computes x Wᵀ + b.
        update: Computes B A x.

    Attributes:
        row_form: Always None, since A is multiplied by dense rows.
    """

    row_form: RowForm | None = None

    def __init__(self, base: Linear, update: LowRankUpdate) -> None:
        self._base = base
        self._update = update

    def __call__(self, x: Rows) -> Tensor:
        """x Wᵀ + b, with B A x added: [tokens, columns] → [tokens, outputs]."""
        return total_of(self.pending(x))

    def pending(self, x: Rows) -> Tensor | PendingUpdate:
        """x Wᵀ + b [tokens, outputs], to which the reader of the result adds B A x."""
        if not self._update.active:
            return self._base(x)
        assert isinstance(x, Tensor)
        y, low = self._base.multiply_and_shrink(x, self._update)
        return PendingUpdate(self._update, low, y)

    def silu_and_mul(self, x: Rows) -> Tensor:
        """silu of the first half of the outputs times the second: [tokens, columns] → [tokens, outputs / 2]."""
        if not self._update.active:
            return self._base.silu_and_mul(x)
        assert isinstance(x, Tensor)
        y, low = self._base.multiply_and_shrink(x, self._update)
        return self._update.expand_silu_and_mul(low, y)
