"""NCCL's sums and gatherings on the current stream, through its C interface, so that graphs can record them and no
thread watches them. torch has loaded the library."""

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
    """ncclUniqueId, which is passed by value."""

    _fields_ = [("bytes", ctypes.c_char * ID_BYTES)]


def new_id() -> bytes:
    """Make the id of a communicator, which one rank gives all others. Raises NcclError if there is no NCCL."""
    made = _Id()
    _check("ncclGetUniqueId", ctypes.byref(made))
    return bytes(memoryview(made))


class Nccl:
    """A communicator of all ranks that divide a layer, which a thread connects, because this takes a second or two.
    `id` is the result of `new_id` in one of the ranks."""

    def __init__(self, id: bytes, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        pool = ThreadPoolExecutor(1, "nccl")
        self._communicator: Future[ctypes.c_void_p] = pool.submit(self._connect, _Id.from_buffer_copy(id))
        pool.shutdown(wait=False)

    def all_reduce(self, x: Tensor) -> None:
        at = ctypes.c_void_p(x.data_ptr())
        _check("ncclAllReduce", at, at, ctypes.c_size_t(x.numel()), _TYPES[x.dtype], _SUM, *self._where())

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        """Compute `Collectives.gather_columns`."""
        parts = [Mesh(rank, tp=self._mesh.tp).padded_part(out.shape[1]) for rank in range(self._mesh.tp)]
        count = parts[self._mesh.tp_rank].count
        own = torch.nn.functional.pad(x[:, :count], (0, parts[0].count - count)).contiguous()
        gathered = own.new_empty((self._mesh.tp, *own.shape))
        addresses = ctypes.c_void_p(own.data_ptr()), ctypes.c_void_p(gathered.data_ptr())
        _check("ncclAllGather", *addresses, ctypes.c_size_t(own.numel()), _TYPES[x.dtype], *self._where())
        for part, theirs in zip(parts, gathered, strict=True):
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
