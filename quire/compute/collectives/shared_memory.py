"""Collectives of ranks on one machine's processors, through memory that all of them have mapped.

A rank that waits for another sleeps until it is woken, so that the other may use its core. Where each rank has cores of
its own, it first spins for some microseconds. Without our kernels torch does the same
(`compute/kernels/cpu/native/ranks.cpp` has the protocol).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.compute.collectives.collectives import Norms
from quire.compute.collectives.layout import LINE, buffer_bytes, calls_of, missing_rank
from quire.compute.kernels.cpu.library import Library, library
from quire.compute.mesh import Mesh
from quire.foundation.processes.shared_memory import SharedMemory

SPINS = 3_000
"""Pauses before a rank sleeps where ranks have cores of their own, which take some 50 µs."""
_LONGEST_NAP_S = 1e-3


def shared_memory_collectives(
    memory: SharedMemory, mesh: Mesh, vocab_size: int, *, spins: int, patience_s: float
) -> Ranks:
    """Make this rank's collectives in shared memory of `memory_bytes`: by our kernels, or by torch where these cannot
    be compiled. Logits have `vocab_size` columns. A rank makes `spins` pauses before it sleeps, 0 where ranks share
    cores, and waits for another up to `patience_s`."""
    size, kernels = buffer_bytes(mesh, vocab_size), library()
    if kernels is None:
        return PlainRanks(memory, mesh, size, patience_s)
    return NativeRanks(kernels, memory, mesh, size, spins, patience_s)


class NativeRanks:
    """Collectives through shared memory by our kernels, which can be recorded.

    Args:
        kernels: The library of the kernels.
        memory, mesh, spins, patience_s: As in shared_memory_collectives.
        size: Bytes of a buffer.
    """

    norms: Norms | None = None

    def __init__(
        self, kernels: Library, memory: SharedMemory, mesh: Mesh, size: int, spins: int, patience_s: float
    ) -> None:
        self._kernels = kernels
        self._shared = torch.frombuffer(memory.view, dtype=torch.uint8)
        self._words = memoryview(memory.view).cast("I")
        self._count = mesh.tp
        state = [self._shared.data_ptr(), mesh.tp_rank, mesh.tp, size, 0, spins, int(patience_s * 1e3)]
        self._state = np.array(state, dtype=np.int64)  # struct Ranks

    @property
    def calls(self) -> int:
        """The number of collectives that this rank has come to."""
        return int(self._state[4])

    @property
    def missing(self) -> int | None:
        """The rank that another has waited for in vain; if there is one, collectives return at once, with wrong
        sums."""
        return missing_rank(self._words, self._count)

    def all_reduce(self, x: Tensor) -> None:
        assert x.is_contiguous()
        self._kernels("all_reduce", x.dtype, self._state.ctypes.data, x.data_ptr(), x.numel())

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        assert out.is_contiguous() and x.stride(1) == 1 and x.dtype == out.dtype
        rows, width = out.shape
        state, stride = self._state.ctypes.data, x.stride(0)
        self._kernels("gather_columns", x.dtype, state, x.data_ptr(), rows, stride, out.data_ptr(), width)

    def gather_rows(self, x: Sequence[Tensor], rows: Sequence[int], out: Sequence[Tensor]) -> None:
        """Write the rows of several groups of ranks, one group after the other, to `out` in each rank.

        All groups have equally many ranks, which are neighbours; the ranks of a group have the same rows.

        Args:
            x: [rows of this group, width] of each tensor, contiguous.
            rows: How many rows each group has.
            out: [rows of all, width] of each, contiguous, of the same dtype.
        """
        for given, whole in zip(x, out, strict=True):
            assert given.is_contiguous() and whole.is_contiguous() and given.dtype == whole.dtype
        of_tensors = [[each.data_ptr() for each in x], [_row_bytes(each) for each in x], [o.data_ptr() for o in out]]
        (given, widths, whole), counts = np.array(of_tensors, dtype=np.int64), np.array(rows, dtype=np.int64)
        addresses = given.ctypes.data, widths.ctypes.data
        state, groups = self._state.ctypes.data, (len(counts), counts.ctypes.data)
        self._kernels("gather_rows", None, state, len(x), *addresses, *groups, whole.ctypes.data)

    def reduce_rows(self, x: Tensor, rows: Sequence[int], out: Tensor) -> None:
        """Write the sum over all ranks of this group's rows to `out`, with the same bits as `all_reduce`.

        Args:
            x: [rows of all, width], contiguous, in the order of `gather_rows`.
            rows: How many rows each group has.
            out: [rows of this group, width], contiguous, of the same dtype.
        """
        assert x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype
        sizes = np.array(rows, dtype=np.int64) * x.shape[1]
        state = self._state.ctypes.data
        self._kernels("reduce_rows", x.dtype, state, x.data_ptr(), len(sizes), sizes.ctypes.data, out.data_ptr())


class PlainRanks:
    """Collectives through shared memory by torch; a rank that waits sleeps for up to a millisecond at a time. A buffer
    has `size` bytes; other arguments are those of shared_memory_collectives."""

    norms: Norms | None = None

    def __init__(self, memory: SharedMemory, mesh: Mesh, size: int, patience_s: float) -> None:
        self._words = memoryview(memory.view).cast("I")
        self._bytes = torch.frombuffer(memory.view, dtype=torch.uint8)
        self._mesh = mesh
        self._size = size
        self._patience_s = patience_s
        self.calls = 0

    @property
    def missing(self) -> int | None:
        return missing_rank(self._words, self._mesh.tp)

    def all_reduce(self, x: Tensor) -> None:
        for piece in torch.split(x.view(-1), self._size // x.element_size()):
            buffers = self._buffers(piece)
            buffers[self._mesh.tp_rank].copy_(piece)
            if not self._meet():
                return
            piece.copy_(sum((each.float() for each in buffers[1:]), start=buffers[0].float()))

    def gather_columns(self, x: Tensor, out: Tensor) -> None:
        parts = [Mesh(rank, tp=self._mesh.tp).padded_part(out.shape[1]) for rank in range(self._mesh.tp)]
        own, most = parts[self._mesh.tp_rank], self._size // (parts[0].count * x.element_size())
        for given, rows in zip(torch.split(x, most), torch.split(out, most), strict=True):
            buffers = self._buffers(rows[:, : parts[0].count])
            buffers[self._mesh.tp_rank][:, : own.count].copy_(given[:, : own.count])
            if not self._meet():
                return
            for part, theirs in zip(parts, buffers, strict=True):
                rows[:, part.start : part.start + part.count] = theirs[:, : part.count]

    def gather_rows(self, x: Sequence[Tensor], rows: Sequence[int], out: Sequence[Tensor]) -> None:
        for given, whole in zip(x, out, strict=True):
            self._gather_rows(given, rows, whole)

    def _gather_rows(self, x: Tensor, rows: Sequence[int], out: Tensor) -> None:
        each, most = self._mesh.tp // len(rows), self._size // _row_bytes(x)
        for at in range(0, max(rows), most):
            buffers = self._buffers(out[:most])
            piece = x[at : at + most]
            buffers[self._mesh.tp_rank][: len(piece)] = piece
            if not self._meet():
                return
            for part, theirs in zip(torch.split(out, list(rows)), buffers[::each], strict=True):
                piece = part[at : at + most]
                piece.copy_(theirs[: len(piece)])

    def reduce_rows(self, x: Tensor, rows: Sequence[int], out: Tensor) -> None:
        own, most = self._mesh.tp_rank * len(rows) // self._mesh.tp, self._size // (len(rows) * _row_bytes(x))
        for at in range(0, max(rows), most):
            pieces = [part[at : at + most] for part in torch.split(x, list(rows))]
            buffers = self._buffers(x.new_empty((len(rows), max(map(len, pieces)), x.shape[1])))
            for piece, place in zip(pieces, buffers[self._mesh.tp_rank], strict=True):
                place[: len(piece)] = piece
            if not self._meet():
                return
            summands = [theirs[own, : len(pieces[own])].float() for theirs in buffers]
            out[at : at + most] = sum(summands[1:], start=summands[0])

    def _buffers(self, like: Tensor) -> list[Tensor]:
        """Return the buffers of all ranks for the next call, as tensors of the shape and dtype of `like`."""
        size, first = like.numel() * like.element_size(), LINE * (self._mesh.tp + 1)
        at = (self.calls + 1 & 1) * self._mesh.tp
        begins = (first + (at + rank) * self._size for rank in range(self._mesh.tp))
        return [self._bytes[begin : begin + size].view(like.dtype).view(like.shape) for begin in begins]

    def _meet(self) -> bool:
        self.calls += 1
        self._words[self._mesh.tp_rank * LINE // 4] = self.calls
        for rank in range(self._mesh.tp):
            waited, nap = 0.0, 1e-5
            while calls_of(self._words, rank) < self.calls:
                if waited > self._patience_s and self.missing is None:
                    self._words[self._mesh.tp * LINE // 4] = 1 + rank
                if self.missing is not None:
                    return False
                time.sleep(nap)
                waited, nap = waited + nap, min(2 * nap, _LONGEST_NAP_S)
        return True


Ranks: TypeAlias = NativeRanks | PlainRanks
"""The Collectives of ranks that share memory."""


def _row_bytes(x: Tensor) -> int:
    return x.shape[1] * x.element_size()
