"""In turns of tenants: which waiting request is next when nobody's flood may keep others waiting.

Knows nothing about slots, blocks or budgets.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from quire.scheduling.scheduler.queue_order import KeyOrder
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.size_order import SizeOrder

QUANTUM = 128
"""Tokens that a tenant may have admitted in one turn; a request that costs more waits for several turns. Far less
than a queue, or the others would wait for most of it."""


class _Tenant:
    def __init__(self, name: str, order: SizeOrder) -> None:
        self.name = name
        self.order = order
        self.deficit = 0


class FairOrder:
    """Deficit round robin (Shreedhar and Varghese 1995) over tenants; for the order within one see SizeOrder.

    Tenants with waiting requests have turns. In each a tenant gains QUANTUM tokens, and its requests are next as long
    as it has as many as they cost; what is left it keeps for its next turn. So all tenants are admitted equally many
    tokens, however many requests each has. Requests that were preempted have paid, and come before all others.

    Requests that are admitted get a queue key by the order of their admission: not the latest to arrive is preempted
    first, which a tenant with few requests would always be beside a flood, but the latest that was admitted.

    A request that finds no room is passed by small ones, of any tenant, until these have cost as much as it does. Then
    all wait, so that it finds what others free.

    Args:
        cost, cost_with_forks: See SizeOrder.
    """

    def __init__(self, cost: Callable[[Request], int], cost_with_forks: Callable[[Request], int]) -> None:
        self._cost = cost
        self._cost_with_forks = cost_with_forks
        self._preempted = KeyOrder()
        self._tenants: dict[str, _Tenant] = {}
        self._turns: deque[_Tenant] = deque()  # the first has its turn
        self._admissions = itertools.count(1)
        self._passed: dict[int, int] = {}  # tokens that have passed a request, by its id
        self._passing: int | None = None  # the request that small ones pass now

    @property
    def first(self) -> Request | None:
        return (self._preempted.first if self._passing is None else None) or self._first_of_turns()

    def skip_first(self) -> None:
        request = self.first
        assert request is not None
        self._order_of(request).skip_first()

    def pass_over_large(self) -> bool:
        head = self.first
        if self._passing is not None or head is None or head in self._preempted:
            return False
        small = self._tenants[head.add.tenant].order.is_small(head)
        if small or self._passed.get(head.id, 0) >= self._cost(head):
            return False
        self._passing = head.id
        for tenant in self._turns:
            tenant.order.only_small = True
        return self.first is not None

    def restore_skipped(self) -> None:
        self._preempted.restore_skipped()
        self._passing = None
        for tenant in self._turns:
            tenant.order.restore_skipped()

    def add(self, request: Request) -> None:
        if not request.preemptions and request.add.tenant not in self._tenants:
            tenant = _Tenant(request.add.tenant, SizeOrder(self._cost, self._cost_with_forks))
            self._tenants[request.add.tenant] = tenant
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
        self._passed.pop(request.id, None)
        self._forget_if_idle(tenant)

    def admit(self, request: Request) -> None:
        if request in self._preempted:
            self._preempted.remove(request)
            return
        tenant, cost = self._tenants[request.add.tenant], self._cost(request)
        self._passed.pop(request.id, None)
        if self._passing is not None:
            self._passed[self._passing] = self._passed.get(self._passing, 0) + cost
        tenant.deficit -= cost
        tenant.order.admit(request)
        self._forget_if_idle(tenant)
        request.queue_key = float(next(self._admissions)), request.id

    def _forget_if_idle(self, tenant: _Tenant) -> None:
        """An idle tenant saves nothing up."""
        if not len(tenant.order):
            del self._tenants[tenant.name]
            if self._turns[0] is tenant:
                self._next_turn()
            self._turns.remove(tenant)

    def _order_of(self, request: Request) -> KeyOrder | SizeOrder:
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
        head = tenant.order.first
        if head is not None and tenant.deficit < self._cost(head):  # one that waits for room saves nothing up
            tenant.deficit += QUANTUM
