"""The host's columns of a step on their way to the device: one buffer.

Knows nothing about what the columns mean.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.worker.buffer_ring import BufferRing, PinnedBufferRing
from quire.worker.pinned_memory import upload

Column = npt.NDArray[np.int64] | npt.NDArray[np.float64]
"""All entries have eight bytes, so one buffer holds both kinds."""
_CUTS = 1_024
"""Parts of the buffers that are remembered."""


class StagingBuffer:
    """Lays columns one behind another in a buffer on the host, whose turn it is.

    The device fetches what is read often into a buffer that stays where it is, so that a recorded step finds its
    columns at the same addresses each time. What is read a few times is read from the host.

    Args:
        capacity: Entries of the buffer. Columns beyond it are copied one by one.
        turns: Of the host's buffers; on a CPU there is one, which is also the device's.
    """

    def __init__(self, capacity: int, turns: BufferRing) -> None:
        self._turns = turns
        self._capacity = capacity
        self._hosts = PinnedBufferRing(turns, capacity)
        self._arrays = list(self._hosts.host.numpy())
        self._device = self._hosts.host[0]
        if turns.apart:
            self._device = torch.zeros(capacity, dtype=torch.int64, device=turns.device)
            self._fetch = kernel("copy_inputs_from_host", turns.device.type)
        self._part = functools.lru_cache(_CUTS)(self._cut)  # steps of as many rows are cut alike
        self._fetched = 0

    def lay(self, fetched: Sequence[Column], visited: Sequence[Column] = ()) -> list[Tensor]:
        """The columns as the device sees them, valid until the turn of this step's buffer comes again.

        Args:
            fetched: Are there in the stream's order after `fetch`, which must come before the next step's columns.
            visited: Stay with the host, where each is read; that takes some 2 µs each time.
        """
        parts: list[npt.NDArray[np.int64]] = []
        turn = self._turns.lay()
        laid, self._fetched = self._placed(fetched, None, 0, parts)
        others, end = self._placed(visited, turn, self._fetched, parts)
        if parts:
            np.concatenate(parts, out=self._arrays[turn][:end])
        return laid + others

    def _placed(
        self, columns: Sequence[Column], turn: int | None, first: int, parts: list[npt.NDArray[np.int64]]
    ) -> tuple[list[Tensor], int]:
        """The columns from this entry on in a buffer, see `_cut`, and the entry behind them; what is to stand there is
        added to `parts`.
        """
        laid: list[Tensor] = []
        for column in columns:
            floats, end = column.dtype == np.float64, first + len(column)
            if end > self._capacity:
                laid.append(upload(column, self._turns.device, torch.float64 if floats else torch.int64))
                continue
            parts.append(column.view(np.int64))
            laid.append(self._part(turn, first, end, floats))
            first = end
        return laid, first

    def fetch(self) -> None:
        """What was laid last becomes the device's; recorded, what was laid before each replay."""
        if self._turns.apart:
            self._fetch(self._hosts.seen, self._turns.on_device, self._part(None, 0, self._fetched, False))

    def holds(self, column: Tensor) -> bool:
        """Whether this is in the buffer that is fetched, and not copied by itself."""
        return column.untyped_storage().data_ptr() == self._device.untyped_storage().data_ptr()

    def _cut(self, turn: int | None, first: int, end: int, floats: bool) -> Tensor:
        """Entries of the device's buffer, or as it sees them in one of the host's."""
        part = (self._device if turn is None else self._hosts.seen[turn])[first:end]
        return part.view(torch.float64) if floats else part


def copied(column: Tensor) -> Tensor:
    """A visited column as the device's own, where it is read often after all; by a kernel, for `clone` would ask a copy
    engine.
    """
    return column + 0
