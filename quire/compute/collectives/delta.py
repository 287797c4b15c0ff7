"""What a layer adds to the residual stream, which the norm behind it may finish while it adds it."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from torch import Tensor

from quire.compute.collectives.collectives import Norms


class PendingDelta(Protocol):
    """A delta that is not finished yet. It is read once, by a norm or by somebody else."""

    def total(self) -> Tensor:
        """The finished delta."""
        ...

    def for_norms(self, norms: Norms) -> tuple[Norms, Tensor]:
        """The norms that can add this to the stream, and what they are given: those that finish it themselves, or
        `norms` and the finished delta.
        """
        ...


Delta: TypeAlias = Tensor | PendingDelta
"""What a layer adds to the residual stream, [tokens, width]."""


def total_of(delta: Delta) -> Tensor:
    """The finished delta."""
    return delta if isinstance(delta, Tensor) else delta.total()
