"""The queue of requests that have no slot, in the order in which they will get one.

Knows nothing about slots, blocks or budgets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from quire.scheduler.request import Request


class FirstComeQueue:
    """First come, first served; one that was put back goes before all others."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def push(self, request: Request) -> None:
        """A new request."""
        self._by_id[request.id] = request

    def push_back(self, request: Request) -> None:
        """A preempted request: it was first once, so it is first again."""
        self._by_id[request.id] = request
        self._by_id.move_to_end(request.id, last=False)

    def remove(self, request: Request) -> None:
        """It got a slot, or is over."""
        del self._by_id[request.id]
