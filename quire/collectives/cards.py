"""Collectives of ranks that have a card each on one host: by the memory of one another's cards, and by NCCL.

Which of them is chosen by the tensor's size alone, so all ranks choose the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quire.collectives.collectives import Norms
from quire.collectives.nccl import ID_BYTES, Nccl, new_id
from quire.collectives.peer_memory import MappedMemory, OwnMemory, PeerMemoryError
from quire.mesh import Mesh

Exchange = Callable[[bytes], Sequence[bytes]]
"""From what this rank offers to what all have offered, by rank; all ranks call it as often."""
Way = Literal["push", "pull", "nccl"]
_log = logging.getLogger(__name__)


class Limits(NamedTuple):
    """The largest sums, in bytes, that small packets carry, and that ranks read in one another's memory.

    Attributes:
        pushed, pulled: See above; for larger ones NCCL is faster.
    """

    pushed: int
    pulled: int


LIMITS = {2: Limits(1 << 20, 1 << 25), 4: Limits(1 << 17, 1 << 19), 8: Limits(1 << 16, 1 << 18)}
"""By ranks; for another number, those of the next larger one. Those of two were measured, on two H100 linked by NVLink:
`python -m tests.gpu.rank_sums … time`. Among more, a rank reads the tensors of all others, so they are lower."""


def limits_of(ranks: int) -> Limits:
    """Of LIMITS."""
    return LIMITS[min((number for number in LIMITS if number >= ranks), default=max(LIMITS))]


def way_of(size: int, ranks: int) -> Way:
    """How tensors of so many bytes are added up.

    >>> way_of(8_192, 2), way_of(1 << 21, 2), way_of(1 << 26, 2)
    ('push', 'pull', 'nccl')
    """
    limits = limits_of(ranks)
    if size % 4 or size > limits.pulled:
        return "nccl"
    return "push" if size <= limits.pushed else "pull"


class Cards:
    """This rank's collectives; see Collectives.

    Args:
        mesh: Its place.
        device: Its card, which is the current one.
        exchange: See Exchange; called twice.
    """

    norms: Norms | None = None

    def __init__(self, mesh: Mesh, device: torch.device, exchange: Exchange) -> None:
        torch.cuda.set_device(device)
        torch.empty(1, device=device)  # the context
        self._mesh = mesh
        window, why_not = _own_window(mesh)
        id = new_id() if mesh.tp_rank == 0 else bytes(ID_BYTES)
        first = mesh.stage * mesh.tp
        own = slice(first, first + mesh.tp)  # other stages' ranks do not divide these layers
        offers = exchange(id + (b"" if window is None else window.handle))[own]
        self._nccl = Nccl(offers[0][:ID_BYTES], mesh, device)
        addresses: list[int] = []
        if window is not None:
            try:
                addresses = _all_addresses(mesh, window, [offer[ID_BYTES:] for offer in offers])
            except PeerMemoryError as error:
                why_not = str(error)
        succeeded = exchange(bytes([bool(addresses)]))[own]
        self._memory = RankMemory(addresses, mesh, device) if all(map(any, succeeded)) else None
        if self._memory is None and mesh.tp_rank == 0:
            _log.warning("ranks       cards do not share memory, so NCCL adds up: %s", why_not or "another rank failed")

    def all_reduce(self, x: Tensor) -> None:
        memory = self._memory
        way = "nccl" if memory is None else way_of(x.numel() * x.element_size(), self._mesh.tp)
        if memory is None or way == "nccl":
            self._nccl.all_reduce(x)
        else:
            memory.all_reduce(x, way)

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        if self._memory is None:
            self._nccl.gather_columns(x, out)
        else:
            self._memory.gather_columns(x, out)

    def rehearsed(self) -> Rehearsed:
        """What a compile warm-up uses in its place."""
        return Rehearsed(self._memory, self._mesh.tp)


class RankMemory:
    """Sums and gatherings by kernels that read and write all ranks' windows; see kernels/triton/ranks/window.py.

    Args:
        addresses: Of the windows, by rank, as this process has them mapped.
        mesh: This rank's place.
        device: Where it computes.
    """

    def __init__(self, addresses: Sequence[int], mesh: Mesh, device: torch.device) -> None:
        from quire.kernels.triton.ranks import pulled, pushed, window  # Triton is there only with a GPU's torch

        self._pulled, self._pushed = pulled, pushed
        self._mesh = mesh
        self._layout = window.layout_of(mesh.tp)
        self._windows = torch.tensor(list(addresses), dtype=torch.int64, device=device)
        self._pushes = torch.zeros(window.PUSHED_PROGRAMS, dtype=torch.int32, device=device)
        self._pulls = torch.zeros(window.PULLED_PROGRAMS, dtype=torch.int32, device=device)

    def all_reduce(self, x: Tensor, way: Way) -> None:
        """x becomes the sum over all ranks."""
        rank, ranks = self._mesh.tp_rank, self._mesh.tp
        if way == "push":
            self._pushed.all_reduce_pushed(x, self._windows, self._pushes, self._layout.arrivals, rank, ranks)
        else:
            self._pulled.all_reduce_pulled(x, self._windows, self._pulls, self._layout.buffers, rank, ranks)

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        """See Collectives."""
        columns = Mesh(0, tp=self._mesh.tp).padded_part(out.shape[1]).count
        most = self._pulled.most_gathered_rows(columns, x.element_size())
        where = (self._windows, self._pulls, self._layout.buffers, self._mesh.tp_rank, self._mesh.tp)
        for given, rows in zip(torch.split(x, most), torch.split(out, most), strict=True):
            self._pulled.gather_columns_pulled(given, rows, columns, *where)


class Rehearsed:
    """Launches our kernels and nothing of NCCL, for a compile warm-up, in which nothing runs.

    Args:
        memory: Of Cards; None: it has none.
        ranks: How many there are.
    """

    norms: Norms | None = None

    def __init__(self, memory: RankMemory | None, ranks: int) -> None:
        self._memory = memory
        self._ranks = ranks

    def all_reduce(self, x: Tensor) -> None:
        way = way_of(x.numel() * x.element_size(), self._ranks)
        if self._memory is not None and way != "nccl":
            self._memory.all_reduce(x, way)

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        if self._memory is not None:
            self._memory.gather_columns(x, out)


def _own_window(mesh: Mesh) -> tuple[OwnMemory | None, str]:
    """This rank's window, or why there is none."""
    try:
        from quire.kernels.triton.ranks import window

        if mesh.tp > window.MOST_RANKS:
            return None, f"more than {window.MOST_RANKS} ranks"
        return OwnMemory(window.layout_of(mesh.tp).size), ""
    except PeerMemoryError as error:
        return None, str(error)


def _all_addresses(mesh: Mesh, own: OwnMemory, handles: Sequence[bytes]) -> list[int]:
    """Where all ranks' windows are here."""
    if not all(handles):
        raise PeerMemoryError("another rank has no memory to share")
    return [own.address if rank == mesh.tp_rank else MappedMemory(handles[rank]).address for rank in range(mesh.tp)]
