"""Collectives of ranks that have a card each on one host: by the memory of one another's cards, and by NCCL.

Which of them is chosen by what all ranks have alike: the tensor's size, its shape and its dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.compute.collectives.collectives import Norms
from quire.compute.collectives.cuda_ipc import MappedMemory, OwnMemory, PeerMemoryError
from quire.compute.collectives.custom_all_reduce import RankMemory, SummingNorms, way_of
from quire.compute.collectives.nccl import ID_BYTES, Nccl, new_id
from quire.compute.mesh import Mesh

Exchange = Callable[[bytes], Sequence[bytes]]
"""Gives the other ranks a message and returns all ranks' messages, by rank; all ranks call it equally often."""
_log = logging.getLogger(__name__)


class Cards:
    """The Collectives of a rank with a card of its own, which is the current one, by kernels of ours or by NCCL.
    `exchange`, which exchanges messages with all ranks, is called twice."""

    def __init__(self, mesh: Mesh, device: torch.device, exchange: Exchange) -> None:
        self._ranks = mesh.tp
        torch.cuda.set_device(device)
        torch.empty(1, device=device)  # the context
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
        self.norms = _norms(self._memory, self.all_reduce)
        if self._memory is None and mesh.tp_rank == 0:
            _log.warning("ranks       cards do not share memory, so NCCL adds up: %s", why_not or "another rank failed")

    def all_reduce(self, x: Tensor) -> None:
        memory = self._memory
        way = "nccl" if memory is None else way_of(x.numel() * x.element_size(), self._ranks)
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
        """Return the Collectives that a compile warm-up uses in place of these."""
        return Rehearsed(self._memory, self._ranks)


class Rehearsed:
    """Launches our kernels and nothing of NCCL, for a compile warm-up, in which nothing runs. `memory` is the shared
    memory of Cards, None where cards do not share memory; `ranks` is the number of ranks."""

    def __init__(self, memory: RankMemory | None, ranks: int) -> None:
        self._memory = memory
        self._ranks = ranks
        self.norms = _norms(memory, self.all_reduce)

    def all_reduce(self, x: Tensor) -> None:
        way = way_of(x.numel() * x.element_size(), self._ranks)
        if self._memory is not None and way != "nccl":
            self._memory.all_reduce(x, way)

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        if self._memory is not None:
            self._memory.gather_columns(x, out)


def _norms(memory: RankMemory | None, all_reduce: Callable[[Tensor], None]) -> Norms | None:
    """Return norms that add up over ranks; None if this rank cannot reach the others' memory."""
    return None if memory is None else SummingNorms(memory, all_reduce).norms


def _own_window(mesh: Mesh) -> tuple[OwnMemory | None, str]:
    """Return this rank's window, or None and the reason why there is none."""
    try:
        from quire.compute.kernels.triton.ranks import window

        if mesh.tp > window.MAX_RANKS:
            return None, f"more than {window.MAX_RANKS} ranks"
        return OwnMemory(window.layout_of(mesh.tp).size), ""
    except PeerMemoryError as error:
        return None, str(error)


def _all_addresses(mesh: Mesh, own: OwnMemory, handles: Sequence[bytes]) -> list[int]:
    if not all(handles):
        raise PeerMemoryError("another rank has no memory to share")
    return [own.address if rank == mesh.tp_rank else MappedMemory(handles[rank]).address for rank in range(mesh.tp)]
