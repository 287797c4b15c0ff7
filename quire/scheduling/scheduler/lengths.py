"""How far every request is, as columns: one entry for each request, one array for each length.

A step moves hundreds of requests by one token each. Column arithmetic does that in a few numpy calls where a loop over
objects would cost more than the device's work.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class Lengths:
    """Columns, indexed by the `Request.index` that each request allocates and frees.

    Attributes:
        planned, computed, host_bound, max_drafts, masked, pools: See Request.
        known: Tokens the host knows.
        in_flight_tokens: Tokens that plans in flight will sample. Until they are known, this and `planned` are upper
            bounds, and `planned - in_flight_tokens` is the lower bound of `planned`.
        limit: Length at which a request ends by count.
        allocated: Tokens that its blocks can hold without asking `BlockTable.reserve`.
        epoch: How often it was reset to be computed again.
        serial: Tells a request from the one that had the same index before.
        last_step: The last step it moved in; only where a pipeline's stages take turns.
    """

    planned: IntArray
    computed: IntArray
    known: IntArray
    in_flight_tokens: IntArray
    prompt: IntArray
    limit: IntArray
    allocated: IntArray
    epoch: IntArray
    serial: IntArray
    host_bound: IntArray
    max_drafts: IntArray
    masked: IntArray
    pools: IntArray
    last_step: IntArray

    def __init__(self, size: int = 64) -> None:
        for name in Lengths.__annotations__:
            setattr(self, name, np.zeros(size, dtype=np.int64))
        self._free = list(range(size - 1, -1, -1))
        self._serials = 0

    def allocate(self, known: int, prompt: int, limit: int) -> int:
        """Allocate the index of a new request; its other lengths are 0."""
        if not self._free:
            self._grow()
        index = self._free.pop()
        for name in Lengths.__annotations__:
            getattr(self, name)[index] = 0
        self._serials += 1
        self.serial[index] = self._serials
        self.known[index], self.prompt[index], self.limit[index] = known, prompt, limit
        return index

    def free(self, index: int) -> None:
        """Free the index of a request that is over. Steps in flight see that by the serial."""
        self.serial[index] = 0
        self._free.append(index)

    def _grow(self) -> None:
        size = len(self.planned)
        for name in Lengths.__annotations__:
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(size, dtype=np.int64)]))
        self._free.extend(range(2 * size - 1, size - 1, -1))
