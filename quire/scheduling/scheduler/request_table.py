"""All requests that are not over: which wait, which have a slot, and what could end any of them.

Owns moving a request between waiting and running, and the free slots. Decides nothing; knows nothing about blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from quire.foundation.config.scheduler import Policy
from quire.foundation.messages.from_engine import EndReason
from quire.scheduling.scheduler.request import ExpectedOutput, Request
from quire.scheduling.scheduler.running_queue import RunningQueue
from quire.scheduling.scheduler.waiting_queue import WaitingQueue

_BY_ITSELF: tuple[EndReason, ...] = ("stop", "length", "repetition")
_MAX_STALE = 64
"""Entries of requests that are over which the heap may keep, beyond one for each that is not."""


class RequestTable:
    """Requests by id, in two queues: `waiting` without a slot, and `running` with one."""

    def __init__(self, num_slots: int, policy: Policy = "fcfs") -> None:
        self.num_slots = num_slots
        self.expected_output = ExpectedOutput()
        self.waiting = WaitingQueue(policy, self.expected_output)
        self.running = RunningQueue()
        self._by_id: dict[int, Request] = {}
        self._free_slots = list(range(num_slots))  # a heap: low slots first keeps the device's reads dense
        self._stop_counts: dict[int, int] = {}  # by token: how many requests it stops
        self._num_detecting = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def get(self, request_id: int) -> Request | None:
        """A request that is not over."""
        return self._by_id.get(request_id)

    @property
    def num_free_slots(self) -> int:
        """Slots that no request has."""
        return len(self._free_slots)

    @property
    def detects_repetition(self) -> bool:
        """Whether any request ends when it repeats itself."""
        return self._num_detecting > 0

    def any_stop_token(self, tokens: Sequence[int]) -> bool:
        """Whether one of the tokens stops some request; if not, no request has to be checked by itself."""
        return not self._stop_counts.keys().isdisjoint(tokens)

    def add(self, request: Request) -> None:
        """A new request waits."""
        self._by_id[request.id] = request
        self._count(request, 1)
        self.waiting.add(request)

    def assign_slot(self, request: Request) -> None:
        """A waiting request runs."""
        self.waiting.admit(request)
        request.slot = heapq.heappop(self._free_slots)
        self.running.add(request)

    def release(self, request: Request) -> None:
        """Free the slot of a running request, which waits again or is over. One that is over is forgotten."""
        if request.ended is None:
            self._free_slot(request)
            self.waiting.add(request)
            return
        del self._by_id[request.id]
        self._count(request, -1)
        if request.ended in _BY_ITSELF and not request.pools:
            self.expected_output.learn(request.output_len)
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._free_slot(request)

    def _free_slot(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None

    def _count(self, request: Request, by: int) -> None:
        """Count what could end the request before its token limit."""
        self._num_detecting += by * (request.repetition is not None)
        for token in request.stop_ids:
            self._stop_counts[token] = self._stop_counts.get(token, 0) + by
            if not self._stop_counts[token]:
                del self._stop_counts[token]


class Deadlines:
    """Deadlines of requests that are not over."""

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
