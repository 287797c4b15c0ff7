"""When requests have to end; knows nothing about why they end earlier."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.request_table import RequestTable

_MAX_STALE = 64
"""Entries of requests that are over which the heap may keep, beyond one for each that is not."""


class Deadlines:
    """Requests by their deadline.

    Args:
        requests: Those that are not over.
    """

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._heap: list[tuple[float, int]] = []

    def add(self, request: Request) -> None:
        """Watch a request; one without a deadline is ignored."""
        if request.add.deadline is None:
            return
        if len(self._heap) > 2 * len(self._requests) + _MAX_STALE:
            self._heap = [entry for entry in self._heap if self._requests.get(entry[1]) is not None]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (request.add.deadline, request.id))

    def due(self, now: float) -> Iterator[Request]:
        """Requests whose deadline has passed, the earliest first; each once."""
        while self._heap and self._heap[0][0] <= now:
            request = self._requests.get(heapq.heappop(self._heap)[1])
            if request is not None:
                yield request
