"""The seam between layers and whatever carries tensors from rank to rank.

Every rank calls the same operations in the same order, with tensors of the same shapes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """Operations over all ranks that divide a layer. Like kernels, they are called within steps that are recorded."""

    def all_reduce(self, x: Tensor) -> None:
        """x, contiguous, becomes the sum over all ranks, with the same bits in each of them."""
        ...

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        """The ranks' columns side by side, in all ranks.

        Args:
            x: [n, at least this rank's columns], of which each rank gives its `Mesh.padded_part` of out's.
            out: [n, columns of all], contiguous.
        """
        ...


class OneRank:
    """Where nothing is divided."""

    def all_reduce(self, x: Tensor) -> None:
        """x is the sum."""

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        """All columns are here."""
        out.copy_(x)
