"""Which waiting request is next: what an order is, and the one by queue key.

Knows nothing about slots, blocks or budgets.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from quire.scheduling.scheduler.request import Request

_MAX_STALE = 64
"""Entries of removed requests that a heap may keep, beyond one for each that waits."""


class QueueOrder(Protocol):
    """The order in which requests get slots. Requests that await something are not in it."""

    @property
    def first(self) -> Request | None:
        """The next request that is not skipped."""
        ...

    def skip_first(self) -> None:
        """Set the first request aside until `restore_skipped`."""
        ...

    def pass_over_large(self) -> bool:
        """Let small requests pass the first one, which finds no room, until `restore_skipped`. Returns whether any may:
        once they have held it up for long, none may."""
        ...

    def restore_skipped(self) -> None:
        """Put requests that were skipped or passed back in their places."""
        ...

    def add(self, request: Request) -> None:
        """Add a request that waits for room."""
        ...

    def remove(self, request: Request) -> None:
        """Remove a request, if it is in this order."""
        ...

    def admit(self, request: Request) -> None:
        """Remove a request because it is admitted. Its queue key may change."""
        ...


class KeyOrder:
    """Requests by queue key, the lowest first. Adding one costs O(log n), looking at the first O(1)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # queue keys; removed requests stay until they come first
        self._skipped: list[tuple[float, int]] = []
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._requests

    @property
    def first(self) -> Request | None:
        heap, requests = self._heap, self._requests
        while heap and heap[0][1] not in requests:
            heapq.heappop(heap)
        return requests[heap[0][1]] if heap else None

    def skip_first(self) -> None:
        self._skipped.append(heapq.heappop(self._heap))

    def pass_over_large(self) -> bool:
        return False

    def restore_skipped(self) -> None:
        for key in self._skipped:
            heapq.heappush(self._heap, key)
        self._skipped.clear()

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        heapq.heappush(self._heap, request.queue_key)

    def remove(self, request: Request) -> None:
        if self._requests.pop(request.id, None) is None:
            return
        if self._heap and self._heap[0] == request.queue_key:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._requests) + _MAX_STALE:
            self._heap = [key for key in self._heap if key[1] in self._requests]
            heapq.heapify(self._heap)

    def admit(self, request: Request) -> None:
        self.remove(request)
