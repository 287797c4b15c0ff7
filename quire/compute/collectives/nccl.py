"""NCCL's sums and gatherings on the current stream, by its C interface: graphs can record them, and no other thread
watches them. torch has loaded the library.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from quire.compute.mesh import Mesh

ID_BYTES = 128
_LIBRARY = "libnccl.so.2"
_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SUM = 0


class NcclError(Exception):
    """NCCL has failed; the message is its own."""


class _Id(ctypes.Structure):
    """ncclUniqueId, which is handed over by value."""

    _fields_ = [("bytes", ctypes.c_char * ID_BYTES)]


def new_id() -> bytes:
    """What all ranks of one communicator are given, from one of them.

    Raises:
        NcclError: There is no NCCL.
    """
    made = _Id()
    _check("ncclGetUniqueId", ctypes.byref(made))
    return bytes(memoryview(made))


class Nccl:
    """A communicator of all ranks that divide a layer, made in a thread, since this takes a second or two.

    Args:
        id: What `new_id` returned in one rank; all ranks have the same.
        mesh: This rank's place.
        device: This rank's card.
    """

    def __init__(self, id: bytes, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        pool = ThreadPoolExecutor(1, "nccl")
        self._communicator: Future[ctypes.c_void_p] = pool.submit(self._connect, _Id.from_buffer_copy(id))
        pool.shutdown(wait=False)

    def all_reduce(self, x: Tensor) -> None:
        """Replace x, contiguous, by its sum over all ranks."""
        at = ctypes.c_void_p(x.data_ptr())
        _check("ncclAllReduce", at, at, ctypes.c_size_t(x.numel()), _TYPES[x.dtype], _SUM, *self._where())

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have the same shape: [ranks, *x.shape]."""
        x = x.contiguous()
        out = x.new_empty((self._mesh.tp, *x.shape))
        own, all_of_them = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        _check("ncclAllGather", own, all_of_them, ctypes.c_size_t(x.numel()), _TYPES[x.dtype], *self._where())
        return out

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        """Write the columns of all ranks, side by side, to `out` in each rank.

        Args:
            x: [n, at least this rank's columns], of which each rank gives its `Mesh.padded_part` of out's.
            out: [n, columns of all], of x's dtype.
        """
        each = self._mesh.padded_part(out.shape[1])
        most = Mesh(0, tp=self._mesh.tp).padded_part(out.shape[1]).count
        own = x[:, : each.count]
        if each.count < most:
            own = torch.nn.functional.pad(own, (0, most - each.count))
        for rank, theirs in enumerate(self.gather(own)):
            part = Mesh(rank, tp=self._mesh.tp).padded_part(out.shape[1])
            out[:, part.start : part.start + part.count] = theirs[:, : part.count]

    def _where(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return self._communicator.result(), ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def _connect(self, id: _Id) -> ctypes.c_void_p:
        torch.cuda.set_device(self._device)
        communicator = ctypes.c_void_p()
        _check("ncclCommInitRank", ctypes.byref(communicator), self._mesh.tp, id, self._mesh.tp_rank)
        return communicator


def _check(name: str, *arguments: object) -> None:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NcclError(f"--tensor-parallel-size needs NCCL, which torch comes with: {error}") from None
    library.ncclGetErrorString.restype = ctypes.c_char_p
    if code := getattr(library, name)(*arguments):
        raise NcclError(f"{name}: {library.ncclGetErrorString(code).decode()}")
