"""All requests that are not over: who waits, who has a slot, and which tokens could end any of them.

Owns moving a request between the two and handing out slots. Decides nothing; knows nothing about blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from quire.scheduler.request import Request
from quire.scheduler.waiting import RankedRequests


class Roster:
    """Requests by id, in two orders.

    Args:
        num_slots: Most requests that run at once.

    Attributes:
        waiting: Without a slot.
        running: With one.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.waiting = RankedRequests()
        self.running = RankedRequests()
        self._by_id: dict[int, Request] = {}
        self._free_slots = list(range(num_slots))  # a heap: low slots first keeps the device's reads dense
        self._stops: dict[int, int] = {}  # how many requests each token ends
        self._watched = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def get(self, request_id: int) -> Request | None:
        """A request that is not over."""
        return self._by_id.get(request_id)

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free_slots)

    @property
    def watches_repetition(self) -> bool:
        """Whether anybody ends when it repeats itself."""
        return self._watched > 0

    def may_stop(self, tokens: Sequence[int]) -> bool:
        """Whether one of the tokens ends somebody; a glance that spares looking at each request."""
        return not self._stops.keys().isdisjoint(tokens)

    def join(self, request: Request) -> None:
        """A new request waits."""
        self._by_id[request.id] = request
        self._count(request, 1)
        self.waiting.add(request)

    def seat(self, request: Request) -> None:
        """A waiting request takes a slot."""
        self.waiting.remove(request)
        request.slot = heapq.heappop(self._free_slots)
        self.running.add(request)

    def unseat(self, request: Request) -> None:
        """A running request waits again."""
        self._free(request)
        self.waiting.add(request)

    def leave(self, request: Request) -> None:
        """A request is over."""
        del self._by_id[request.id]
        self._count(request, -1)
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None

    def _count(self, request: Request, by: int) -> None:
        """Keep the tokens that end anybody."""
        self._watched += by * (request.add.sampling.repetition_detection is not None)
        for token in request.stop_ids:
            self._stops[token] = self._stops.get(token, 0) + by
            if not self._stops[token]:
                del self._stops[token]
