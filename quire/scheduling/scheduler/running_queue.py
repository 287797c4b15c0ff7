"""The order in which requests are served, and the queue of those that have a slot.

Knows nothing about slots, blocks or budgets.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np

from quire.foundation.config.scheduler import Policy
from quire.foundation.messages.to_engine import Add
from quire.scheduling.scheduler.lengths import IntArray
from quire.scheduling.scheduler.request import Request

PRIORITY_S = 60.0
"""One level of priority counts as this many seconds of waiting, so that a flood of urgent requests starves nobody."""


def queue_key_of(add: Add, policy: Policy) -> tuple[float, int]:
    """A request's sort key: its arrival, under `priority` shifted by its priority; the id breaks ties."""
    shift = add.priority * PRIORITY_S if policy == "priority" else 0.0
    return add.arrival + shift, add.id


class RunningQueue:
    """Requests sorted by queue key; at most as many as there are slots."""

    def __init__(self) -> None:
        self._sorted: list[Request] = []
        self._indices: IntArray | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._sorted)

    def __getitem__(self, place: int) -> Request:
        return self._sorted[place]

    @property
    def indices(self) -> IntArray:
        """The requests' indices into Lengths, in queue order."""
        if self._indices is None:
            self._indices = np.fromiter((r.index for r in self._sorted), dtype=np.int64, count=len(self._sorted))
        return self._indices

    def add(self, request: Request) -> None:
        """Insert a request at its place."""
        place = bisect.bisect_right(self._sorted, request.queue_key, key=lambda r: r.queue_key)
        self._sorted.insert(place, request)
        if self._indices is not None:
            self._indices = np.concatenate((self._indices[:place], (request.index,), self._indices[place:]))

    def remove(self, request: Request) -> None:
        """Remove a request, which must be here."""
        place = bisect.bisect_left(self._sorted, request.queue_key, key=lambda r: r.queue_key)
        assert self._sorted[place] is request
        del self._sorted[place]
        if self._indices is not None:
            self._indices = np.concatenate((self._indices[:place], self._indices[place + 1 :]))
