"""The way of a step's columns from the host to the device: one pinned buffer a step.

Knows nothing about what the columns mean.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.runtime.worker.buffer_ring import BufferRing, PinnedBuffers
from quire.runtime.worker.host_memory import upload

HostColumn = npt.NDArray[np.int64] | npt.NDArray[np.float64]
"""All entries have eight bytes, so one buffer holds both types."""
_MAX_VIEWS = 1_024
"""Views of the buffers that are kept: steps of as many rows have the same ones."""


class StagingBuffer:
    """Writes a step's columns one behind another into a host buffer of the ring.

    First come columns that are copied into a device buffer, which stays where it is: a captured graph finds them at the
    same addresses in each step. Then come zero-copy columns, which kernels read from the host, at some 2 µs a read.

        copied = staging.begin()
        slots = copied.add(slots_on_host)
        zero_copy = copied.end()
        block_ids = zero_copy.add(block_ids_on_host)
        staged = zero_copy.finish()
        staged.copy_to_device()

    The tensors are valid until the ring comes back to the step's buffer. A column that finds no room in the buffer is
    uploaded by itself.

    Args:
        capacity: Entries of the buffer.
        ring: The host's buffers; on a CPU there is one, which is also the device's.

    Attributes:
        overflowed: Whether a column of the step found no room.
    """

    def __init__(self, capacity: int, ring: BufferRing) -> None:
        self._ring = ring
        self._capacity = capacity
        self._buffers = PinnedBuffers(ring, capacity)
        self._arrays = list(self._buffers.host.numpy())
        self._device_buffer = self._buffers.host[0]
        if ring.has_device_memory:
            self._device_buffer = torch.zeros(capacity, dtype=torch.int64, device=ring.device)
            self._copy = kernel("copy_inputs_from_host", ring.device.type)
        self._view = functools.lru_cache(_MAX_VIEWS)(self._slice)
        self._index = 0
        self._staged: StagedColumns | None = None
        self.overflowed = False

    def begin(self) -> CopiedColumns:
        """Begin a step, whose buffer is the ring's next. The step before has been copied, or replayed."""
        assert self._staged is None or self._staged.is_copied, "a step was staged, and neither copied nor replayed"
        self._index = self._ring.advance()
        self.overflowed = False
        return CopiedColumns(self)

    def begin_alike(self, copied: npt.NDArray[np.int64]) -> ZeroCopyColumns:
        """Begin a step with the `copied` columns of another one of the same shape."""
        self.begin()
        return ZeroCopyColumns(self, [copied], len(copied))

    def place(
        self, column: HostColumn, parts: list[npt.NDArray[np.int64]], first: int, *, on_device: bool
    ) -> tuple[Tensor, int]:
        """Put a column behind the `parts` before it, which end at `first`; returns its tensor and where it ends."""
        floats, end = column.dtype == np.float64, first + len(column)
        if end > self._capacity:
            self.overflowed = True
            return upload(column, self._ring.device, torch.float64 if floats else torch.int64), first
        parts.append(column.view(np.int64))
        return self._view(None if on_device else self._index, first, end, floats), end

    def write(self, parts: list[npt.NDArray[np.int64]], copied: int, end: int) -> StagedColumns:
        """Write a step's columns into its host buffer; the first `copied` entries will be copied to the device."""
        array = self._arrays[self._index]
        if parts:
            np.concatenate(parts, out=array[:end])
        self._staged = StagedColumns(self, array, copied)
        return self._staged

    def launch_copy(self, entries: int) -> None:
        """Launch the copy of the first `entries` of the buffer that the device is at."""
        if self._ring.has_device_memory:
            self._copy(self._buffers.device_view, self._ring.device_steps, self._view(None, 0, entries, False))

    def _slice(self, index: int | None, first: int, end: int, floats: bool) -> Tensor:
        """Entries of the device's buffer, or of one of the host's as the device sees it."""
        part = (self._device_buffer if index is None else self._buffers.device_view[index])[first:end]
        return part.view(torch.float64) if floats else part


class CopiedColumns:
    """The columns of a step that are copied to the device; they come first."""

    __slots__ = ("_buffer", "_end", "_parts")

    def __init__(self, buffer: StagingBuffer) -> None:
        self._buffer = buffer
        self._parts: list[npt.NDArray[np.int64]] | None = []
        self._end = 0

    def add(self, column: HostColumn) -> Tensor:
        """Add a column; returns it in device memory, in stream order after the copy."""
        assert self._parts is not None, "copied columns come before zero-copy ones"
        tensor, self._end = self._buffer.place(column, self._parts, self._end, on_device=True)
        return tensor

    def end(self) -> ZeroCopyColumns:
        """End the copied columns: zero-copy ones come next. Called once."""
        parts, self._parts = self._parts, None
        assert parts is not None, "the copied columns have ended"
        return ZeroCopyColumns(self._buffer, parts, self._end)


class ZeroCopyColumns:
    """The columns of a step that kernels read from the host; they come last.

    Args:
        parts: The copied columns.
        copied: Entries of the copied columns.
    """

    __slots__ = ("_buffer", "_copied", "_end", "_parts")

    def __init__(self, buffer: StagingBuffer, parts: list[npt.NDArray[np.int64]], copied: int) -> None:
        self._buffer = buffer
        self._parts = parts
        self._copied = self._end = copied

    def add(self, column: HostColumn) -> Tensor:
        """Add a column; returns it in host memory, as the device reads it once `finish` has written it."""
        tensor, self._end = self._buffer.place(column, self._parts, self._end, on_device=False)
        return tensor

    def finish(self) -> StagedColumns:
        """Write the step's columns into its host buffer."""
        return self._buffer.write(self._parts, self._copied, self._end)


class StagedColumns:
    """The columns of a step, staged. The device copies them once: by `copy_to_device`, or when it replays a graph.

    Args:
        array: The step's host buffer.
        num_copied: Entries that are copied.

    Attributes:
        is_copied: Whether their copy is launched.
    """

    __slots__ = ("_array", "_buffer", "is_copied", "num_copied")

    def __init__(self, buffer: StagingBuffer, array: npt.NDArray[np.int64], num_copied: int) -> None:
        self._buffer = buffer
        self._array = array
        self.num_copied = num_copied
        self.is_copied = False

    @property
    def copied(self) -> npt.NDArray[np.int64]:
        """All columns that are copied to the device."""
        return self._array[: self.num_copied].copy()

    def copy_to_device(self) -> None:
        """Launch the copy."""
        self.copy_by_replay()
        self._buffer.launch_copy(self.num_copied)

    def copy_by_replay(self) -> None:
        """Take note that a graph is replayed, which begins with the copy."""
        assert not self.is_copied, "a step copies its columns once"
        self.is_copied = True

    def captured(self) -> StagedColumns:
        """The columns of a step that is captured now, and has copied its own: their copy goes into the graph."""
        assert self.is_copied, "the step that is captured has not copied its columns"
        return _CapturedColumns(self._buffer, self._array, self.num_copied)


class _CapturedColumns(StagedColumns):
    """The columns at the beginning of a captured step: each replay copies as many entries of what was staged before."""

    __slots__ = ()

    def copy_to_device(self) -> None:
        """Launch the copy, into the graph that is captured."""
        self._buffer.launch_copy(self.num_copied)


def to_device_memory(column: Tensor) -> Tensor:
    """A zero-copy column that is read often after all, copied by a kernel: `clone` would use a copy engine."""
    return column + 0
