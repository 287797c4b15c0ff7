"""The interface between layers and what carries tensors from rank to rank.

Every rank calls the same operations in the same order, with tensors of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.quantized_rows import QuantizedRows


class Norms(NamedTuple):
    """Root mean square norms of the residual stream, with the addition before them."""

    rms_norm: Callable[..., None]
    rms_norm_quantized: Callable[..., QuantizedRows]


def norms_of(device: str) -> Norms:
    """Return the norm kernels of a type of device."""
    return Norms(kernel("rms_norm", device), kernel("rms_norm_quantized", device))


class Collectives(Protocol):
    """Operations over all ranks that divide a layer. Like kernels, they are called within steps that are recorded.

    `norms`, unless None, add up over ranks what they add to the stream, and may overwrite it.
    """

    @property
    def norms(self) -> Norms | None: ...

    def all_reduce(self, x: Tensor) -> None:
        """Replace x, contiguous, by its sum over all ranks, with the same bits in each of them."""
        ...

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        """Write the columns of all ranks side by side to `out` [n, columns of all], contiguous, in each rank. Each rank
        gives its `Mesh.padded_part` of out's columns from x [n, at least this rank's columns]."""
        ...


class OneRank:
    """The Collectives of a model that is not divided."""

    norms: Norms | None = None

    def all_reduce(self, x: Tensor) -> None:
        """Leave x as it is: the only rank's tensor is the sum."""

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        """Copy x to `out`: the only rank has all columns."""
        out.copy_(x)
