"""Moves a step's columns from the host to the device through one pinned buffer per step."""

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
"""All entries have eight bytes, so that one buffer holds both types."""
_MAX_VIEWS = 1_024
"""Maximum number of cached views of the buffers; steps with equal row counts share views."""


class StagingBuffer:
    """Writes a step's columns one after another into a host buffer of the ring.

    Columns that are copied come first. Their device buffer never moves, so a captured graph finds them at the same
    addresses in each step. Zero-copy columns follow, which kernels read from the host in about 2 µs per read.

        copied = staging.begin()
        slots = copied.add(slots_on_host)
        zero_copy = copied.end()
        block_ids = zero_copy.add(block_ids_on_host)
        staged = zero_copy.finish()
        staged.copy_to_device()

    The tensors are valid until the ring reuses the step's buffer. A column that does not fit into the `capacity`
    entries is uploaded separately, and sets `overflowed`. On a CPU the ring has one buffer, which is the device's too.
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
        """Begin a step in the ring's next buffer. The step before must have been copied or replayed."""
        assert self._staged is None or self._staged.is_copied, "a step was staged, and neither copied nor replayed"
        self._index = self._ring.advance()
        self.overflowed = False
        return CopiedColumns(self)

    def begin_alike(self, copied: npt.NDArray[np.int64]) -> ZeroCopyColumns:
        """Begin a step with the `copied` columns of an earlier step of the same shape."""
        self.begin()
        return ZeroCopyColumns(self, [copied], len(copied))

    def place(
        self, column: HostColumn, parts: list[npt.NDArray[np.int64]], first: int, *, on_device: bool
    ) -> tuple[Tensor, int]:
        """Place a column after `parts`, which end at entry `first`; returns its tensor and its end."""
        floats, end = column.dtype == np.float64, first + len(column)
        if end > self._capacity:
            self.overflowed = True
            return upload(column, self._ring.device, torch.float64 if floats else torch.int64), first
        parts.append(column.view(np.int64))
        return self._view(None if on_device else self._index, first, end, floats), end

    def write(self, parts: list[npt.NDArray[np.int64]], copied: int, end: int) -> StagedColumns:
        """Write a step's columns into its host buffer. The first `copied` entries will be copied to the device."""
        array = self._arrays[self._index]
        if parts:
            np.concatenate(parts, out=array[:end])
        self._staged = StagedColumns(self, array, copied)
        return self._staged

    def launch_copy(self, entries: int) -> None:
        """Launch the copy of the first `entries` of the buffer whose step the device runs next."""
        if self._ring.has_device_memory:
            self._copy(self._buffers.device_view, self._ring.device_steps, self._view(None, 0, entries, False))

    def _slice(self, index: int | None, first: int, end: int, floats: bool) -> Tensor:
        """Return entries of the device buffer if `index` is None, else of a host buffer as the device sees it."""
        part = (self._device_buffer if index is None else self._buffers.device_view[index])[first:end]
        return part.view(torch.float64) if floats else part


class CopiedColumns:
    """The first columns of a step, which are copied to the device."""

    __slots__ = ("_buffer", "_end", "_parts")

    def __init__(self, buffer: StagingBuffer) -> None:
        self._buffer = buffer
        self._parts: list[npt.NDArray[np.int64]] | None = []
        self._end = 0

    def add(self, column: HostColumn) -> Tensor:
        """Add a column; returns its tensor in device memory, which is valid in stream order after the copy."""
        assert self._parts is not None, "copied columns come before zero-copy ones"
        tensor, self._end = self._buffer.place(column, self._parts, self._end, on_device=True)
        return tensor

    def end(self) -> ZeroCopyColumns:
        """End the copied columns, and begin the zero-copy columns. Called once."""
        parts, self._parts = self._parts, None
        assert parts is not None, "the copied columns have ended"
        return ZeroCopyColumns(self._buffer, parts, self._end)


class ZeroCopyColumns:
    """The last columns of a step, which kernels read from the host. They follow the copied columns `parts`, which have
    `copied` entries."""

    __slots__ = ("_buffer", "_copied", "_end", "_parts")

    def __init__(self, buffer: StagingBuffer, parts: list[npt.NDArray[np.int64]], copied: int) -> None:
        self._buffer = buffer
        self._parts = parts
        self._copied = self._end = copied

    def add(self, column: HostColumn) -> Tensor:
        """Add a column; returns its tensor in host memory, which the device may read after `finish`."""
        tensor, self._end = self._buffer.place(column, self._parts, self._end, on_device=False)
        return tensor

    def finish(self) -> StagedColumns:
        return self._buffer.write(self._parts, self._copied, self._end)


class StagedColumns:
    """The staged columns of a step, in its host buffer `array`. The device copies the first `num_copied` entries once,
    by `copy_to_device` or in the replay of a graph. `is_copied` says whether the copy was launched."""

    __slots__ = ("_array", "_buffer", "_is_captured", "is_copied", "num_copied")

    def __init__(
        self, buffer: StagingBuffer, array: npt.NDArray[np.int64], num_copied: int, *, is_captured: bool = False
    ) -> None:
        self._buffer = buffer
        self._array = array
        self._is_captured = is_captured
        self.num_copied = num_copied
        self.is_copied = False

    @property
    def copied(self) -> npt.NDArray[np.int64]:
        """A copy of the columns that are copied to the device."""
        return self._array[: self.num_copied].copy()

    def copy_to_device(self) -> None:
        """Launch the copy, or put it into the graph that is being captured."""
        if not self._is_captured:
            self.copy_by_replay()
        self._buffer.launch_copy(self.num_copied)

    def copy_by_replay(self) -> None:
        """Note that a graph is replayed, which begins with the copy."""
        assert not self.is_copied, "a step copies its columns once"
        self.is_copied = True

    def captured(self) -> StagedColumns:
        """Return the columns for the capture of a step that has already copied its own. Each replay copies the same
        number of entries from the buffer staged last."""
        assert self.is_copied, "the step that is captured has not copied its columns"
        return StagedColumns(self._buffer, self._array, self.num_copied, is_captured=True)


def to_device_memory(column: Tensor) -> Tensor:
    """Copy a zero-copy column that is read often, with a kernel, because `clone` would use a copy engine."""
    return column + 0
