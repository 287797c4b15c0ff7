"""Which waiting request is next: under `priority` by queue key, else in turns of tenants, and of sizes within a tenant.

So nobody's flood keeps other tenants waiting, and no crowd of long prompts a short one. Knows nothing about slots,
blocks or budgets.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

from quire.foundation.config.scheduler import Policy
from quire.scheduling.scheduler.request import Request

QUANTUM = 128
"""Tokens that a tenant may have admitted in one turn; a request that costs more waits for several turns. Far less
than a queue, or the others would wait for most of it."""
SMALL = 1_024
"""Requests of up to this many tokens are of one size; each further size goes up to four times as many."""
_MAX_STALE = 64
"""Entries of removed requests that a heap may keep, beyond one for each that waits."""


class QueueOrder:
    """The order in which requests get slots. Requests that await something are not in it.

    Under `priority` the lowest queue key is next. Else tenants with waiting requests have turns by deficit round robin
    (Shreedhar and Varghese 1995). In each a tenant gains QUANTUM tokens, and its requests are next as long as it has as
    many as they cost; what is left it keeps for its next turn. So all tenants are admitted equally many tokens, however
    many requests each has. Requests that were preempted have paid, and come before all others.

    Requests that are admitted in turns get a queue key by the order of their admission: not the latest to arrive is
    preempted first, which a tenant with few requests would always be beside a flood, but the latest that was admitted.

    A request that finds no room is passed by small ones, of any tenant, until these have cost as much as it does. Then
    all wait, so that it finds what others free.

    Args:
        policy: See Scheduler.
        cost: Of a waiting request, in tokens.
        cost_with_forks: The cost of a prompt and all the requests that fork from it.
    """

    def __init__(
        self, policy: Policy, cost: Callable[[Request], int], cost_with_forks: Callable[[Request], int]
    ) -> None:
        self._by_key = policy == "priority"
        self._cost = cost
        self._cost_with_forks = cost_with_forks
        self._without_turns = KeyHeap()  # under `priority` all, else those that were preempted
        self._tenants: dict[str, _Tenant] = {}
        self._turns: deque[_Tenant] = deque()  # the first has its turn
        self._admissions = itertools.count(1)
        self._passed: dict[int, int] = {}  # tokens that have passed a request, by its id
        self._passing: int | None = None  # the request that small ones pass now

    @property
    def first(self) -> Request | None:
        """The next request that is not skipped."""
        return (self._without_turns.first if self._passing is None else None) or self._first_of_turns()

    def skip_first(self) -> None:
        """Set the first request aside until `restore_skipped`."""
        request = self.first
        assert request is not None
        self._heap_of(request).skip_first()

    def pass_over_large(self) -> bool:
        """Let small requests pass the first one, which finds no room, until `restore_skipped`. Returns whether any may:
        once they have held it up for long, none may."""
        head = self.first
        if self._passing is not None or head is None or head in self._without_turns:
            return False
        if not self._heap_of(head).size or self._passed.get(head.id, 0) >= self._cost(head):
            return False
        self._passing = head.id
        for tenant in self._turns:
            tenant.only_small = True
        return self.first is not None

    def restore_skipped(self) -> None:
        """Put requests that were skipped or passed back in their places."""
        self._without_turns.restore_skipped()
        self._passing = None
        for tenant in self._turns:
            tenant.restore_skipped()

    def add(self, request: Request) -> None:
        """Add a request that waits for room."""
        if self._by_key or request.preemptions:
            self._without_turns.add(request)
            return
        name = request.add.tenant
        if name not in self._tenants:
            self._tenants[name] = tenant = _Tenant(name)
            self._turns.append(tenant)
            if len(self._turns) == 1:
                tenant.deficit = QUANTUM
        self._tenants[name].add(request, self._cost_with_forks)

    def remove(self, request: Request) -> None:
        """Remove a request, if it is in this order."""
        self._without_turns.remove(request)
        tenant = self._tenants.get(request.add.tenant)
        if tenant is not None and request.id in tenant.heap_of:
            self._remove_from_turns(request, tenant)

    def admit(self, request: Request) -> None:
        """Remove a request because it is admitted. Its queue key may change."""
        if request in self._without_turns:
            self._without_turns.remove(request)
            return
        tenant, cost = self._tenants[request.add.tenant], self._cost(request)
        if self._passing is not None:
            self._passed[self._passing] = self._passed.get(self._passing, 0) + cost
        tenant.deficit -= cost
        tenant.heap_of[request.id].served += cost
        self._remove_from_turns(request, tenant)
        request.queue_key = float(next(self._admissions)), request.id

    def _remove_from_turns(self, request: Request, tenant: _Tenant) -> None:
        tenant.remove(request)
        self._passed.pop(request.id, None)
        if not tenant.heap_of:  # an idle tenant saves nothing up
            del self._tenants[tenant.name]
            if self._turns[0] is tenant:
                self._next_turn()
            self._turns.remove(tenant)

    def _heap_of(self, request: Request) -> KeyHeap:
        if request in self._without_turns:
            return self._without_turns
        return self._tenants[request.add.tenant].heap_of[request.id]

    def _first_of_turns(self) -> Request | None:
        """The next request of the tenant whose turn it is, after as many turns as are needed for one that can pay."""
        while True:
            for _ in range(len(self._turns)):
                tenant = self._turns[0]
                head = tenant.first
                if head is not None and self._cost(head) <= tenant.deficit:
                    return head
                self._next_turn()
            heads = [(tenant, head) for tenant in self._turns if (head := tenant.first) is not None]
            if not heads:
                return None
            lacking = min(self._cost(head) - tenant.deficit for tenant, head in heads)
            for tenant, _ in heads:  # whole rounds in which nobody could pay
                tenant.deficit += max(0, (lacking - 1) // QUANTUM) * QUANTUM

    def _next_turn(self) -> None:
        self._turns.rotate(-1)
        tenant = self._turns[0]
        head = tenant.first
        if head is not None and tenant.deficit < self._cost(head):  # one that waits for room saves nothing up
            tenant.deficit += QUANTUM


class _Tenant:
    """The waiting requests of one tenant, small and large ones in turns.

    Sizes are admitted equally many tokens while requests of several wait; by arrival within one size. The next size is
    the one that was admitted fewest tokens, and the smallest of several (stride scheduling, Waldspurger and Weihl
    1995). A size that nobody waited in begins where the others are: it saves nothing up. A prompt is as large as all
    its choices together, and each of these is of that size: so very many choices of a short prompt keep a short request
    waiting no longer than a long prompt does.

    Attributes:
        name: The tenant's.
        deficit: Tokens that it may have admitted in this turn.
        only_small: Whether only the smallest size is looked at.
        heap_of: The heap of each request's size, by request.
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

    def add(self, request: Request, cost_with_forks: Callable[[Request], int]) -> None:
        """Add a request."""
        heap = None if request.parent is None else self.heap_of.get(request.parent.id)
        if heap is None:
            size = _size(cost_with_forks(request))
            heap = self._sizes.setdefault(size, KeyHeap(size))
        if not len(heap):
            busy = [other.served for other in self._sizes.values() if len(other)]
            heap.served = max(heap.served, min(busy, default=0))
        self.heap_of[request.id] = heap
        heap.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request."""
        self.heap_of.pop(request.id).remove(request)


class KeyHeap:
    """Requests by queue key, the lowest first. Adding one costs O(log n), looking at the first O(1).

    Args:
        size: Of these requests: 0 up to SMALL tokens, 1 up to four times as many, and so on.

    Attributes:
        size: As given.
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


def _size(tokens: int) -> int:
    size = 0
    while tokens > SMALL << 2 * size:
        size += 1
    return size
