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

    First come columns that `copy_to_device` copies into a device buffer, which stays where it is: a captured graph
    finds them at the same addresses in each step. Then come zero-copy columns, which kernels read from the host, at
    some 2 µs a read.

        staging.begin()
        slots = staging.copied(slots_on_host)
        block_ids = staging.zero_copy(block_ids_on_host)
        staging.finish()
        staging.copy_to_device()

    The tensors are valid until the ring comes back to the step's buffer. A column that finds no room in the buffer is
    uploaded by itself.

    Args:
        capacity: Entries of the buffer.
        ring: Of the host's buffers; on a CPU there is one, which is also the device's.

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
        self._parts: list[npt.NDArray[np.int64]] = []
        self._end = 0
        self.num_copied = 0
        self.overflowed = False

    def begin(self) -> None:
        """Begin a step, whose buffer is the ring's next."""
        self._index = self._ring.advance()
        self._parts = []
        self._end = self.num_copied = 0
        self.overflowed = False

    def copied(self, column: HostColumn) -> Tensor:
        """The column in device memory, in stream order after `copy_to_device`."""
        assert self._end == self.num_copied, "copied columns come before zero-copy ones"
        tensor = self._add(column, None)
        self.num_copied = self._end
        return tensor

    def zero_copy(self, column: HostColumn) -> Tensor:
        """The column in host memory, as the device reads it."""
        return self._add(column, self._index)

    def finish(self) -> None:
        """Write the step's columns into its host buffer."""
        if self._parts:
            np.concatenate(self._parts, out=self._arrays[self._index][: self._end])

    @property
    def copied_columns(self) -> npt.NDArray[np.int64]:
        """All columns of the step that was staged last that are copied to the device."""
        columns: npt.NDArray[np.int64] = self._arrays[self._index][: self.num_copied].copy()
        return columns

    def begin_alike(self, copied: npt.NDArray[np.int64]) -> None:
        """Begin a step with the `copied_columns` of another one of the same shape."""
        self.begin()
        self._parts = [copied]
        self._end = self.num_copied = len(copied)

    def copy_to_device(self) -> None:
        """Launch the copy, once a step and before the next step begins. Captured in a graph, it copies what was staged
        before each replay.
        """
        if self._ring.has_device_memory:
            self._copy(self._buffers.device_view, self._ring.device_steps, self._view(None, 0, self.num_copied, False))

    def _add(self, column: HostColumn, index: int | None) -> Tensor:
        """Put the column behind those before it; see `_slice`."""
        floats, first, end = column.dtype == np.float64, self._end, self._end + len(column)
        if end > self._capacity:
            self.overflowed = True
            return upload(column, self._ring.device, torch.float64 if floats else torch.int64)
        self._parts.append(column.view(np.int64))
        self._end = end
        return self._view(index, first, end, floats)

    def _slice(self, index: int | None, first: int, end: int, floats: bool) -> Tensor:
        """Entries of the device's buffer, or of one of the host's as the device sees it."""
        part = (self._device_buffer if index is None else self._buffers.device_view[index])[first:end]
        return part.view(torch.float64) if floats else part


def to_device_memory(column: Tensor) -> Tensor:
    """A zero-copy column that is read often after all, copied by a kernel: `clone` would use a copy engine."""
    return column + 0
