"""Who goes first: the order of requests, and the queue of those that have no slot.

Knows nothing about slots, blocks or budgets.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np

from quire.config.scheduler import Policy
from quire.messages import Add
from quire.scheduler.lengths import Column
from quire.scheduler.request import Request

PRIORITY_S = 60.0
"""One level of priority is worth this many seconds of waiting, so that a flood of urgent requests starves nobody."""


def rank_of(add: Add, policy: Policy) -> tuple[float, int]:
    """A request's place among all: by arrival, under `priority` moved by its priority; the id breaks ties."""
    moved = add.priority * PRIORITY_S if policy == "priority" else 0.0
    return add.arrival + moved, add.id


class RankedRequests:
    """Requests in the order of their ranks. A rank never changes, so one that was put back is first again."""

    def __init__(self) -> None:
        self._sorted: list[Request] = []
        self._rows: Column | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._sorted)

    def __getitem__(self, index: int) -> Request:
        return self._sorted[index]

    @property
    def rows(self) -> Column:
        """Their rows of lengths, in the same order."""
        if self._rows is None:
            self._rows = np.fromiter((r.row for r in self._sorted), dtype=np.int64, count=len(self._sorted))
        return self._rows

    def add(self, request: Request) -> None:
        """Takes its place by rank."""
        index = bisect.bisect_right(self._sorted, request.rank, key=lambda r: r.rank)
        self._sorted.insert(index, request)
        if self._rows is not None:
            self._rows = np.concatenate((self._rows[:index], (request.row,), self._rows[index:]))

    def remove(self, request: Request) -> None:
        """Leaves; it must be there."""
        index = bisect.bisect_left(self._sorted, request.rank, key=lambda r: r.rank)
        assert self._sorted[index] is request
        del self._sorted[index]
        if self._rows is not None:
            self._rows = np.concatenate((self._rows[:index], self._rows[index + 1 :]))
