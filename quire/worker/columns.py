"""The host's columns of a step on their way to the device: one buffer, one copy.

Knows nothing about what the columns mean.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.worker.upload import upload

Column = npt.NDArray[np.int64] | npt.NDArray[np.float64]
"""All entries have eight bytes, so one buffer holds both kinds."""
_CUTS = 1_024
"""Parts of the buffer that are remembered."""


class StepColumns:
    """Lays columns one behind another in a buffer on the host and brings them to the device in one copy.

    The device's buffer stays where it is, so a recorded step finds its columns at the same addresses each time. The
    host's is one of several in turn: its copy may still be under way when the next step is laid.

    Args:
        capacity: Entries of the buffer. Columns beyond it are copied one by one.
        device: Where they are wanted; on a CPU nothing is copied.
        in_flight: Steps that may be laid while the copy of an earlier one is under way.
    """

    def __init__(self, capacity: int, device: torch.device, in_flight: int = 2) -> None:
        on_gpu = device.type != "cpu"
        turns = in_flight + 1 if on_gpu else 1
        self._hosts = [torch.zeros(capacity, dtype=torch.int64, pin_memory=on_gpu) for _ in range(turns)]
        self._device = torch.zeros(capacity, dtype=torch.int64, device=device) if on_gpu else self._hosts[0]
        self._arrays = [host.numpy() for host in self._hosts]
        self._part = functools.lru_cache(_CUTS)(self._cut)  # steps of as many rows are cut alike
        self._turn = 0

    def lay(self, columns: Sequence[Column]) -> list[Tensor]:
        """The columns on the device, in the stream's order; valid until the next step is laid."""
        self._turn = (self._turn + 1) % len(self._hosts)
        entries, first = self._arrays[self._turn], 0
        laid: list[Tensor] = []
        parts: list[npt.NDArray[np.int64]] = []
        for column in columns:
            floats, end = column.dtype == np.float64, first + len(column)
            if end > len(entries):
                laid.append(upload(column, self._device.device, torch.float64 if floats else torch.int64))
                continue
            parts.append(column.view(np.int64))
            laid.append(self._part(first, end, floats))
            first = end
        if parts:
            np.concatenate(parts, out=entries[:first])
        host = self._hosts[self._turn]
        if self._device is not host:
            self._part(0, first, False).copy_(host[:first], non_blocking=True)
        return laid

    def holds(self, column: Tensor) -> bool:
        """Whether this is in the buffer, and not copied by itself."""
        return column.untyped_storage().data_ptr() == self._device.untyped_storage().data_ptr()

    def _cut(self, first: int, end: int, floats: bool) -> Tensor:
        """Entries of the device's buffer."""
        part = self._device[first:end]
        return part.view(torch.float64) if floats else part
