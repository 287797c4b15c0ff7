"""The waiting requests of one tenant: heaps by queue key, one for each size, which are served in turns."""

from __future__ import annotations

import heapq

from quire.scheduling.scheduler.request import Request

SMALL = 1_024
"""Requests of up to this many tokens are of one size; each further size goes up to four times as many."""
_MAX_STALE = 64
"""Entries of removed requests that a heap may keep, beyond one for each that waits."""


class Tenant:
    """The waiting requests of one tenant, small and large ones in turns.

    Sizes are admitted equally many tokens while requests of several sizes wait; within a size, requests come by
    arrival. The next size is the one that was admitted fewest tokens, and of several the smallest (stride scheduling,
    Waldspurger and Weihl 1995). A size that nobody waited in begins where the others are: it saves nothing up. All
    choices of a prompt have the size of all of them together, so very many choices of a short prompt keep a short
    request waiting no longer than a long prompt does.

    Attributes:
        deficit: Tokens that it may have admitted in this turn.
        only_small: Whether only the smallest size is looked at.
        heap_of: The heap of each request's size, by request id.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.deficit = 0
        self.only_small = False
        self.heap_of: dict[int, KeyHeap] = {}
        self._sizes: dict[int, KeyHeap] = {}

    @property
    def first(self) -> Request | None:
        """The first request of the size that is next."""
        if self.only_small:
            return self._sizes[0].first if 0 in self._sizes else None
        if len(self._sizes) == 1:
            return next(iter(self._sizes.values())).first
        waiting = [heap for heap in self._sizes.values() if heap.first is not None]
        return min(waiting, key=lambda heap: (heap.served, heap.size)).first if waiting else None

    def restore_skipped(self) -> None:
        """Put requests that were skipped or passed back in their places."""
        self.only_small = False
        for heap in self._sizes.values():
            heap.restore_skipped()

    def add(self, request: Request, tokens: int) -> None:
        """Add a request whose prompt and all its forks cost so many tokens."""
        heap = None if request.parent is None else self.heap_of.get(request.parent.id)
        if heap is None:
            size = size_of(tokens)
            heap = self._sizes.setdefault(size, KeyHeap(size))
        if not len(heap):
            busy = [other.served for other in self._sizes.values() if len(other)]
            heap.served = max(heap.served, min(busy, default=0))
        self.heap_of[request.id] = heap
        heap.add(request)


class KeyHeap:
    """Requests by queue key, the lowest first. Adding one costs O(log n), looking at the first O(1).

    Attributes:
        size: Size of the requests: 0 up to SMALL tokens, 1 up to four times as many, and so on.
        served: Tokens that were admitted of this size, as the tenant's other sizes count them.
    """

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.served = 0
        self._heap: list[tuple[float, int]] = []  # queue keys; removed requests stay until they come first
        self._skipped: list[tuple[float, int]] = []
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._requests

    @property
    def first(self) -> Request | None:
        """The request with the lowest key that is not skipped."""
        heap, requests = self._heap, self._requests
        while heap and heap[0][1] not in requests:
            heapq.heappop(heap)
        return requests[heap[0][1]] if heap else None

    def skip_first(self) -> None:
        """Set the first request aside until `restore_skipped`."""
        self._skipped.append(heapq.heappop(self._heap))

    def restore_skipped(self) -> None:
        """Put requests that were skipped back in their places."""
        for key in self._skipped:
            heapq.heappush(self._heap, key)
        self._skipped.clear()

    def add(self, request: Request) -> None:
        """Add a request."""
        self._requests[request.id] = request
        heapq.heappush(self._heap, request.queue_key)

    def remove(self, request: Request) -> None:
        """Remove a request, if it is here."""
        if self._requests.pop(request.id, None) is None:
            return
        if self._heap and self._heap[0] == request.queue_key:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._requests) + _MAX_STALE:
            self._heap = [key for key in self._heap if key[1] in self._requests]
            heapq.heapify(self._heap)


def size_of(tokens: int) -> int:
    """The number of the size that a request of so many tokens has."""
    size = 0
    while tokens > SMALL << 2 * size:
        size += 1
    return size
