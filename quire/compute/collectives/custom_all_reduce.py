"""Sums of ranks with a card each by the memory of one another's cards: which kernels make sums of which sizes, and
norms that add up over ranks what they add to the residual stream.

The choice depends on what all ranks have alike: a tensor's size, its shape and its dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.compute.collectives.collectives import Norms, norms_of
from quire.compute.kernels.reference.quantized_rows import QuantizedRows
from quire.compute.mesh import Mesh

NormWay = Literal["push", "pull", "separate"]


class NormMemory(Protocol):
    """The part of RankMemory that makes a sum and its norm by one kernel."""

    def norm_way_of(self, x: Tensor, weight: Tensor) -> NormWay: ...

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None, delta: Tensor, way: NormWay
    ) -> None: ...


class SummingNorms:
    """Norms that add up over ranks, by one kernel of `memory` if it has one for both, otherwise by `all_reduce` and the
    card's own norm. `norms` is for `Collectives.norms`."""

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


Way = Literal["push", "pull", "nccl"]


class Limits(NamedTuple):
    """The largest sums, in bytes, that small packets carry, and that ranks read in one another's memory.

    Attributes:
        pushed: The largest sum in packets, with a norm behind it or without.
        pulled: The largest sum that ranks read, without a norm; NCCL is faster for larger ones.
        normed: The largest sum that ranks read, with a norm; a sum and a norm by themselves are faster for larger ones.
    """

    pushed: int
    pulled: int
    normed: int


LIMITS = {
    2: Limits(1 << 20, 1 << 25, 1 << 30),
    4: Limits(1 << 17, 1 << 19, 1 << 19),
    8: Limits(1 << 16, 1 << 18, 1 << 18),
}
"""The limits by the number of ranks; other numbers have the limits of the next larger one.

The limits of two ranks were measured, on two H100 linked by NVLink: `python -m tests.gpu.rank_sums … time`. With more
ranks, each reads the tensors of all others, so limits are lower.
"""


def limits_of(ranks: int) -> Limits:
    return LIMITS[min((number for number in LIMITS if number >= ranks), default=max(LIMITS))]


def way_of(size: int, ranks: int) -> Way:
    """Return how tensors of `size` bytes are added up over so many ranks.

    >>> way_of(8_192, 2), way_of(1 << 21, 2), way_of(1 << 26, 2)
    ('push', 'pull', 'nccl')
    """
    limits = limits_of(ranks)
    if size % 4 or size > limits.pulled:
        return "nccl"
    return "push" if size <= limits.pushed else "pull"


class RankMemory:
    """Sums and gatherings by kernels that read and write all ranks' windows (compute/kernels/triton/ranks/window.py),
    whose `addresses` in this process are given by rank."""

    def __init__(self, addresses: Sequence[int], mesh: Mesh, device: torch.device) -> None:
        # Triton is there only with a GPU's torch
        from quire.compute.kernels.triton.ranks import norm_rows, pulled, pulled_norm, pushed, pushed_norm, window

        self._pulled, self._pushed = pulled, pushed
        self._norm_rows, self._pulled_norm, self._pushed_norm = norm_rows, pulled_norm, pushed_norm
        self._mesh = mesh
        self._layout = window.layout_of(mesh.tp)
        self._windows = torch.tensor(list(addresses), dtype=torch.int64, device=device)
        self._pushes = torch.zeros(window.PUSHED_PROGRAMS, dtype=torch.int32, device=device)
        self._pulls = torch.zeros(window.PULLED_PROGRAMS, dtype=torch.int32, device=device)
        self._steps = torch.zeros(window.PULLED_PROGRAMS, dtype=torch.int32, device=device)

    def all_reduce(self, x: Tensor, way: Way) -> None:
        """Replace x, contiguous, by its sum over all ranks."""
        rank, ranks = self._mesh.tp_rank, self._mesh.tp
        if way == "push":
            self._pushed.all_reduce_pushed(x, self._windows, self._pushes, self._layout.arrivals, rank, ranks)
        else:
            self._pulled.all_reduce_pulled(x, self._windows, self._pulls, self._layout.buffers, rank, ranks)

    def norm_way_of(self, x: Tensor, weight: Tensor) -> NormWay:
        """Return which kernel makes both the sum and the norm of x [rows, width], or that none does ("separate")."""
        limits, size = limits_of(self._mesh.tp), x.numel() * x.element_size()
        if not self._norm_rows.serves_rows(x, weight) or size > limits.normed:
            return "separate"
        return "push" if size <= limits.pushed and self._pushed_norm.can_push_rows(x) else "pull"

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None, delta: Tensor, way: NormWay
    ) -> None:
        """Add the sum of delta over ranks to x, and write the norm of x to out by one kernel.

        Args:
            x: [rows, width], the residual stream, changed in place.
            weight: [width], the norm's weight.
            eps: Added to the mean square.
            out: [rows, width], the norm of x, or its codes where there are scales.
            scales: [rows, 1] fp32, the codes' scales, which are written; None: the norm is not quantized.
            delta: [rows, width], this rank's summand, which may be overwritten.
            way: What `norm_way_of` returned, but not "separate".
        """
        given, windows = (x, weight, eps, out, scales, delta), self._windows
        rank, ranks, layout = self._mesh.tp_rank, self._mesh.tp, self._layout
        if way == "push":
            self._pushed_norm.rms_norm_pushed(*given, windows, self._pushes, layout.arrivals, rank, ranks)
        else:
            places = layout.row_flags, layout.rings
            self._pulled_norm.rms_norm_pulled(*given, windows, self._steps, *places, rank, ranks)

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        """Compute `Collectives.gather_columns`."""
        columns = Mesh(0, tp=self._mesh.tp).padded_part(out.shape[1]).count
        most = self._pulled.max_gathered_rows(columns, x.element_size())
        where = (self._windows, self._pulls, self._layout.buffers, self._mesh.tp_rank, self._mesh.tp)
        for given, rows in zip(torch.split(x, most), torch.split(out, most), strict=True):
            self._pulled.gather_columns_pulled(given, rows, columns, *where)
