"""File bytes into tensors on a CUDA device, at the speed of its bus.

A copy to the device straight from a mapped file goes through the driver's own small buffers, one thread for all. Here
several threads read pieces of the file into pinned buffers (`preadv`: no page of a mapping has to be faulted in), and
the device copies each buffer by itself while others are filled. Dtypes are converted, and columns picked, on the
device. The buffers go round: one is filled again when the device has copied what it held.

Knows nothing about names or file formats.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import CheckpointError

BUFFER_BYTES = 8 * 2**20
BUFFERS = 16
THREADS = 8
"""Beside those that load layers: a large tensor's pieces are read by these."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: the open file's descriptor, and where the tensor's first byte lies in it."""

    file: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class CopyStream(Protocol):
    """Asynchronous copies from host buffers to the device, in the order they were enqueued."""

    def pin(self, buffer: Tensor) -> None:
        """Let the device read this memory directly."""
        ...

    def unpin(self, buffer: Tensor) -> None: ...

    def scratch(self, size: int) -> Tensor:
        """uint8 [size] on the device."""
        ...

    def wait_for_caller(self) -> None:
        """Let copies from now on wait for what the calling thread has enqueued on the device."""
        ...

    def make_caller_wait(self) -> None:
        """Let what the calling thread enqueues on the device from now on wait for all copies."""
        ...

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Enqueue out = source."""
        ...

    def record_event(self) -> CopyEvent:
        """An event behind all copies enqueued so far."""
        ...


class CopyEvent(Protocol):
    """A point in the order of copies."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""
        ...


@dataclass
class _Buffer:
    host: Tensor
    view: memoryview
    scratch: Tensor | None = None
    copied: CopyEvent | None = None


@dataclass(frozen=True)
class _Piece:
    """Rows that follow each other in a file and fit into a buffer: columns from `left` on go to `out` [rows, n].

    `first` is the number of the first element in the tensor; `rows` and `columns` are read.
    """

    first: int
    rows: int
    columns: int
    left: int
    out: Tensor


class GpuTensorLoader:
    """Reads tensors from files to one device. Safe to use from several threads."""

    def __init__(
        self, copies: CopyStream, buffers: int = BUFFERS, buffer_bytes: int = BUFFER_BYTES, threads: int = THREADS
    ) -> None:
        self._copies = copies
        self._bytes = buffer_bytes
        self._buffers: list[_Buffer] = []
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(threads, "loader")
        pages = _pages(buffers * buffer_bytes)
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)
        copies.pin(self._memory)
        for begin in range(0, buffers * buffer_bytes, buffer_bytes):
            part = slice(begin, begin + buffer_bytes)
            self._buffers.append(_Buffer(self._memory[part], memoryview(pages)[part]))
            self._free.put(self._buffers[-1])

    def read(self, stored: FileTensor, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Fill `out`, on the device, from the window of its shape that begins at `start` (default: the origin).

        When this returns the bytes are on their way, and what the calling thread asks of the device next finds them.
        Raises CheckpointError if the file is shorter than it was when it was opened.
        """
        contiguous = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        room = self._bytes // stored.dtype.itemsize
        pieces = list(_pieces(contiguous, stored.shape, tuple(start or [0] * out.dim()), 0, room))
        self._copies.wait_for_caller()
        if len(pieces) == 1:  # not worth handing over
            self._load_piece(stored, pieces[0])
        else:
            for moved in [self._pool.submit(self._load_piece, stored, piece) for piece in pieces]:
                moved.result()
        self._copies.make_caller_wait()
        if contiguous is not out:
            out.copy_(contiguous)

    def close(self) -> None:
        """Wait for every copy and free the buffers."""
        self._pool.shutdown()
        for buffer in self._buffers:
            if buffer.copied is not None:
                buffer.copied.synchronize()
        self._buffers.clear()
        self._copies.unpin(self._memory)

    @torch.inference_mode()
    def _load_piece(self, stored: FileTensor, piece: _Piece) -> None:
        buffer = self._free.get()
        try:
            if buffer.copied is not None:
                buffer.copied.synchronize()
            size = piece.rows * piece.columns * stored.dtype.itemsize
            _read_fully(stored.file, stored.offset + piece.first * stored.dtype.itemsize, buffer.view[:size])
            self._copy_piece(buffer, size, stored.dtype, piece)
            buffer.copied = self._copies.record_event()
        finally:
            self._free.put(buffer)

    def _copy_piece(self, buffer: _Buffer, size: int, dtype: torch.dtype, piece: _Piece) -> None:
        shape, width = (piece.rows, piece.columns), piece.out.shape[1]
        if dtype == piece.out.dtype and width == piece.columns:
            self._copies.copy(piece.out, buffer.host[:size].view(dtype).view(shape))
            return
        if buffer.scratch is None:
            buffer.scratch = self._copies.scratch(self._bytes)
        self._copies.copy(buffer.scratch[:size], buffer.host[:size])
        wanted = buffer.scratch[:size].view(dtype).view(shape)[:, piece.left : piece.left + width]
        self._copies.copy(piece.out, wanted)


def _pages(size: int) -> mmap.mmap:
    """Fresh memory, in huge pages where the system has them: few pages are pinned sooner than many."""
    pages = mmap.mmap(-1, size)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _pieces(out: Tensor, shape: Sequence[int], start: Sequence[int], first: int, room: int) -> Iterator[_Piece]:
    """Cut the window of `out`'s shape at `start` into pieces.

    Args:
        out: Where the window goes; contiguous.
        shape: The shape of the stored tensor, or of a part of it.
        start: Where the window begins in it.
        first: The number of the part's first element in the tensor.
        room: How many elements a buffer holds.
    """
    if out.dim() > 1 and out.shape[0] == 1:
        yield from _pieces(out[0], shape[1:], start[1:], first + start[0] * prod(shape[1:]), room)
    elif out.dim() == 0 or tuple(out.shape[1:]) == tuple(shape[1:]):
        first += start[0] * prod(shape[1:]) if out.dim() else 0
        for part in torch.split(out.view(1, -1), room, dim=1):
            yield _Piece(first, 1, part.shape[1], 0, part)
            first += part.shape[1]
    elif out.dim() > 2:
        for number, part in enumerate(out):
            yield from _pieces(part, shape[1:], start[1:], first + (start[0] + number) * prod(shape[1:]), room)
    else:
        columns = shape[1]
        assert columns <= room, "a row fits into a buffer"
        first += start[0] * columns
        for rows in torch.split(out, room // columns):
            yield _Piece(first, rows.shape[0], columns, start[1], rows)
            first += rows.shape[0] * columns


def _read_fully(file: int, offset: int, target: memoryview) -> None:
    while target:
        count = os.preadv(file, [target], offset)
        if not count:
            raise CheckpointError("A file of weights was cut short while it was read: download it again.")
        target, offset = target[count:], offset + count


class CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: set[int] = set()

    def pin(self, buffer: Tensor) -> None:
        """Register the buffer's pages with the driver, if the system allows it; otherwise copies are slower."""
        with torch.cuda.device(self._device):
            code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(code) == 0:
            self._pinned.add(buffer.data_ptr())
        else:
            _log.info("weights     a buffer could not be pinned (CUDA error %d): reading is slower", int(code))
            with suppress(RuntimeError):  # CUDA reports the failed call at the next kernel launch: launch one here
                torch.zeros(1, device=self._device)

    def unpin(self, buffer: Tensor) -> None:
        if buffer.data_ptr() in self._pinned:
            self._pinned.remove(buffer.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]

    def scratch(self, size: int) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def wait_for_caller(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def make_caller_wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def copy(self, out: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)

    def record_event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event
