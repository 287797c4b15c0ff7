"""Norms."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.kernels.table import kernel
from quire.layers.layer import Place
from quire.weights.checkpoint import Checkpoint, Need


class RMSNorm:
    """Root mean square norm, with the residual addition before it."""

    def __init__(self, name: str, width: int, eps: float, place: Place) -> None:
        self._need = Need(f"{name}.weight", (width,))
        self._eps = eps
        self._place = place
        self._rms_norm = kernel("rms_norm", place.device.type)
        self._weight: Tensor

    def needs(self) -> Iterator[Need]:
        """See Layer."""
        yield self._need

    def pull(self, checkpoint: Checkpoint) -> None:
        """See Layer."""
        self._weight = torch.empty(self._need.shape, dtype=self._place.dtype, device=self._place.device)
        checkpoint.read(self._need.name, self._weight)

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """The norm of x, after `delta` is added to x in place; both [tokens, width]."""
        out = torch.empty_like(x)
        self._rms_norm(x, self._weight, self._eps, out, delta)
        return out
