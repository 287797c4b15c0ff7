"""The queue of requests without a slot, and sums over it for the load.

Adding costs O(log n), looking at the first and reading the sums O(1). Knows nothing about slots, blocks or budgets.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quire.messages import queued_tokens
from quire.scheduler.expected_output import ExpectedOutput
from quire.scheduler.request import Request

_MAX_STALE = 64
"""Entries of removed requests that the heap may keep, beyond one for each that waits."""


class _Share(NamedTuple):
    """A request's share of the sums."""

    tokens: int
    uncomputed: int
    queued: int
    deferred: bool
    awaiting: bool


class WaitingQueue:
    """Requests by queue key, the lowest first. A key never changes, so a preempted request is first again.

    Args:
        expected_output: How long outputs are expected to be.

    Attributes:
        num_tokens: Known tokens of all requests.
        num_uncomputed: Tokens of these that are still to be computed, if the prefix cache holds nothing of theirs.
        queued_tokens: What all requests add to the queue, see `quire.messages.queued_tokens`.
        num_deferred: Requests that wait for a token in flight, the prompt they fork from, or what they await, not for
            room.
        num_awaiting: Requests that await something, see Request. They hold nobody: `first` passes over them.
    """

    def __init__(self, expected_output: ExpectedOutput) -> None:
        self._expected_output = expected_output
        self.num_tokens = 0
        self.queued_tokens = 0
        self.num_uncomputed = 0
        self.num_deferred = 0
        self.num_awaiting = 0
        self._heap: list[tuple[float, int]] = []  # queue keys; removed requests stay until they come first
        self._skipped: list[tuple[float, int]] = []
        self._requests: dict[int, Request] = {}
        self._shares: dict[int, _Share] = {}
        self._in_flight: dict[int, Request] = {}  # preempted while plans in flight sample for them

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def first(self) -> Request | None:
        """The first that is not skipped."""
        heap, requests = self._heap, self._requests
        while heap and heap[0][1] not in requests:
            heapq.heappop(heap)
        return requests[heap[0][1]] if heap else None

    def skip_first(self) -> None:
        """Set the first aside until `restore_skipped`."""
        self._skipped.append(heapq.heappop(self._heap))

    def restore_skipped(self) -> None:
        """Those that were skipped are back at their places."""
        for key in self._skipped:
            heapq.heappush(self._heap, key)
        self._skipped.clear()

    def add(self, request: Request) -> None:
        """A request waits."""
        self._requests[request.id] = request
        if not request.awaits:
            heapq.heappush(self._heap, request.queue_key)
        self._count(request)

    def hold(self, requests: Iterable[Request], what: str) -> None:
        """These await something from now on, beside what they may await already."""
        for request in requests:
            request.awaits.add(what)
            self.refresh(request)
        self._heap = [key for key in self._heap if key[1] in self._requests and not self._requests[key[1]].awaits]
        heapq.heapify(self._heap)

    def release(self, request: Request) -> None:
        """A request awaits nothing any more."""
        heapq.heappush(self._heap, request.queue_key)
        self.refresh(request)

    def remove(self, request: Request) -> None:
        """A request runs, or is over."""
        del self._requests[request.id]
        self._discount(request)
        if self._heap and self._heap[0] == request.queue_key:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._requests) + _MAX_STALE:
            self._heap = [key for key in self._heap if key[1] in self._requests]
            heapq.heapify(self._heap)

    def refresh(self, request: Request) -> None:
        """Its lengths or its parent have changed."""
        self._discount(request)
        self._count(request)

    def refresh_in_flight(self) -> None:
        """A result was processed, and may have brought tokens of requests that were preempted meanwhile."""
        for request in list(self._in_flight.values()):
            self.refresh(request)

    def _count(self, request: Request) -> None:
        known, in_flight, awaits = len(request.tokens), request.in_flight_tokens, bool(request.awaits)
        computed = request.planned if request.parent is None else max(request.planned, request.add.prompt_len - 1)
        output = min(request.limit - known, self._expected_output.tokens - request.output_len)
        share = _Share(
            known,
            0 if awaits else known - computed,
            queued_tokens(request.add.sampling, known - computed, output),
            in_flight > 0 or request.parent is not None or awaits,
            awaits,
        )
        self._shares[request.id] = share
        self.num_tokens += share.tokens
        self.num_uncomputed += share.uncomputed
        self.queued_tokens += share.queued
        self.num_deferred += share.deferred
        self.num_awaiting += share.awaiting
        if in_flight:
            self._in_flight[request.id] = request

    def _discount(self, request: Request) -> None:
        share = self._shares.pop(request.id)
        self.num_tokens -= share.tokens
        self.num_uncomputed -= share.uncomputed
        self.queued_tokens -= share.queued
        self.num_deferred -= share.deferred
        self.num_awaiting -= share.awaiting
        self._in_flight.pop(request.id, None)
