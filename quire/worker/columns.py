"""The host's columns of a step on their way to the device: one buffer, one copy.

Knows nothing about what the columns mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Column = npt.NDArray[np.int64] | npt.NDArray[np.float64]
_WIDTH = 8
"""Bytes of an entry: all columns are int64 or float64, so one buffer holds both."""


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
        self._turn = 0

    def lay(self, columns: Sequence[Column]) -> list[Tensor]:
        """The columns on the device, in the stream's order; valid until the next step is laid."""
        self._turn = (self._turn + 1) % len(self._hosts)
        host, first = self._hosts[self._turn], 0
        entries = host.numpy()
        laid: list[Tensor] = []
        for column in columns:
            end = first + len(column)
            if end > len(entries):
                laid.append(torch.from_numpy(column).to(self._device.device))
                continue
            entries[first:end] = column.view(np.int64)
            part = self._device[first:end]
            laid.append(part if column.dtype == np.int64 else part.view(torch.float64))
            first = end
        if self._device is not host:
            self._device[:first].copy_(host[:first], non_blocking=True)
        return laid
