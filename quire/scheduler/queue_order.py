"""Which waiting request is next: by queue key, or in turns of tenants.

Knows nothing about slots, blocks or budgets.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.scheduler.request import Request

QUANTUM = 128
"""Tokens that a tenant may have admitted in one turn; a request that costs more waits for several turns. Far less
than a queue, or the others would wait for most of it."""
_MAX_STALE = 64
"""Entries of removed requests that a heap may keep, beyond one for each that waits."""


class QueueOrder(Protocol):
    """An order of requests, without those that await something."""

    @property
    def first(self) -> Request | None:
        """The next one that is not skipped."""
        ...

    def skip_first(self) -> None:
        """Set the first aside until `restore_skipped`."""
        ...

    def restore_skipped(self) -> None:
        """Those that were skipped are back at their places."""
        ...

    def add(self, request: Request) -> None:
        """A request waits for room."""
        ...

    def remove(self, request: Request) -> None:
        """It does no more; it may not have done before."""
        ...

    def admit(self, request: Request) -> None:
        """The same, because it is admitted. Its queue key may change."""
        ...


class KeyOrder:
    """By queue key, the lowest first. Adding costs O(log n), looking at the first O(1)."""

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


class _Tenant:
    def __init__(self, name: str) -> None:
        self.name = name
        self.order = KeyOrder()
        self.deficit = 0


class FairOrder:
    """Deficit round robin (Shreedhar and Varghese 1995) over tenants; by arrival within one.

    Tenants with waiting requests have turns. In each a tenant gains QUANTUM tokens, and its requests are next as long
    as it has as many as they cost; what is left it keeps for its next turn. So all tenants are admitted equally many
    tokens, however many requests each has. Requests that were preempted have paid, and come before all others.

    Requests that are admitted get a queue key by the order of their admission: not the latest to arrive is preempted
    first, which a tenant with few requests would always be beside a flood, but the latest that was admitted.

    Args:
        cost: Of a waiting request, in tokens.
    """

    def __init__(self, cost: Callable[[Request], int]) -> None:
        self._cost = cost
        self._preempted = KeyOrder()
        self._tenants: dict[str, _Tenant] = {}
        self._turns: deque[_Tenant] = deque()  # the first has its turn
        self._admissions = itertools.count(1)

    @property
    def first(self) -> Request | None:
        return self._preempted.first or self._first_of_turns()

    def skip_first(self) -> None:
        request = self.first
        assert request is not None
        self._order_of(request).skip_first()

    def restore_skipped(self) -> None:
        self._preempted.restore_skipped()
        for tenant in self._turns:
            tenant.order.restore_skipped()

    def add(self, request: Request) -> None:
        if not request.preemptions and request.add.tenant not in self._tenants:
            self._tenants[request.add.tenant] = tenant = _Tenant(request.add.tenant)
            self._turns.append(tenant)
            if len(self._turns) == 1:
                tenant.deficit = QUANTUM
        self._order_of(request).add(request)

    def remove(self, request: Request) -> None:
        self._preempted.remove(request)
        tenant = self._tenants.get(request.add.tenant)
        if tenant is None or request not in tenant.order:
            return
        tenant.order.remove(request)
        if not len(tenant.order):  # an idle tenant saves nothing up
            del self._tenants[tenant.name]
            if self._turns[0] is tenant:
                self._next_turn()
            self._turns.remove(tenant)

    def admit(self, request: Request) -> None:
        if request in self._preempted:
            self._preempted.remove(request)
            return
        self._tenants[request.add.tenant].deficit -= self._cost(request)
        self.remove(request)
        request.queue_key = float(next(self._admissions)), request.id

    def _order_of(self, request: Request) -> KeyOrder:
        return self._preempted if request.preemptions else self._tenants[request.add.tenant].order

    def _first_of_turns(self) -> Request | None:
        """The next request of the tenant whose turn it is, after as many turns as are needed for one that can pay."""
        while True:
            for _ in range(len(self._turns)):
                tenant = self._turns[0]
                head = tenant.order.first
                if head is not None and self._cost(head) <= tenant.deficit:
                    return head
                self._next_turn()
            heads = [(tenant, head) for tenant in self._turns if (head := tenant.order.first) is not None]
            if not heads:
                return None
            lacking = min(self._cost(head) - tenant.deficit for tenant, head in heads)
            for tenant, _ in heads:  # whole rounds in which nobody could pay
                tenant.deficit += max(0, (lacking - 1) // QUANTUM) * QUANTUM

    def _next_turn(self) -> None:
        self._turns.rotate(-1)
        tenant = self._turns[0]
        if tenant.order.first is not None:
            tenant.deficit += QUANTUM
