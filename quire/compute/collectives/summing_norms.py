"""Norms of ranks with a card each that add up over ranks what they add to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from quire.compute.collectives.collectives import Norms, norms_of
from quire.compute.kernels.reference.quantized_rows import QuantizedRows

NormWay = Literal["push", "pull", "separate"]


class NormMemory(Protocol):
    """Memory of all ranks in which one kernel can make a sum and its norm; see RankMemory."""

    def norm_way_of(self, x: Tensor, weight: Tensor) -> NormWay:
        """Return which kernel makes both the sum and the norm of x [rows, width], or that none does ("separate")."""
        ...

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None, delta: Tensor, way: NormWay
    ) -> None:
        """Add the sum of delta over ranks to x, and write the norm of x to out; with scales, the norm's codes."""
        ...


class SummingNorms:
    """Norms that add up over ranks, by one kernel if one does both, otherwise by a sum and then the card's own norm.

    Args:
        memory: Makes a sum and its norm by one kernel.
        all_reduce: Makes a sum.

    Attributes:
        norms: The norms, for `Collectives.norms`.
    """

    def __init__(self, memory: NormMemory, all_reduce: Callable[[Tensor], None]) -> None:
        self._memory = memory
        self._all_reduce = all_reduce
        self._separate = norms_of("cuda")
        self.norms = Norms(self._rms_norm, self._rms_norm_quantized)

    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, delta: Tensor) -> None:
        way = self._memory.norm_way_of(x, weight)
        if way == "separate":
            self._all_reduce(delta)
            self._separate.rms_norm(x, weight, eps, out, delta)
        else:
            self._memory.norm(x, weight, eps, out, None, delta, way)

    def _rms_norm_quantized(
        self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, delta: Tensor
    ) -> QuantizedRows:
        way = self._memory.norm_way_of(x, weight)
        if way == "separate":
            self._all_reduce(delta)
            return self._separate.rms_norm_quantized(x, weight, eps, dtype, delta)
        codes = torch.empty(x.shape, dtype=dtype, device=x.device)
        made = QuantizedRows(codes, torch.empty((len(x), 1), dtype=torch.float32, device=x.device), x.dtype)
        self._memory.norm(x, weight, eps, made.codes, made.scales, delta, way)
        return made
