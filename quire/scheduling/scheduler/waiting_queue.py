"""The queue of requests without a slot: which of them is next, and sums over all of them for the load.

Nobody's flood keeps other tenants waiting, and no crowd of long prompts a short one. Adding costs O(log n), looking at
the first and reading the sums O(1). Knows nothing about slots, blocks or budgets.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quire.foundation.config.scheduler import Policy
from quire.foundation.messages.to_engine import queued_tokens
from quire.scheduling.scheduler.request import ExpectedOutput, Request
from quire.scheduling.scheduler.tenant_queue import KeyHeap, Tenant

QUANTUM = 128
"""Tokens that a tenant may have admitted in one turn; a request that costs more waits for several turns. Far less
than a queue, or the others would wait for most of it."""


class _Share(NamedTuple):
    """A request's share of the sums, and `queued` also what it costs its tenant."""

    tokens: int
    uncomputed: int
    queued: int
    deferred: bool
    awaiting: bool


class WaitingQueue:
    """Requests that wait, and the order in which they get slots. Requests that await something have no place in it.

    Under `priority` the lowest queue key is next. Else tenants with waiting requests have turns by deficit round robin
    (Shreedhar and Varghese 1995). In each a tenant gains QUANTUM tokens, and its requests are next as long as it has as
    many as they cost; what is left it keeps for its next turn. So all tenants are admitted equally many tokens, however
    many requests each has. Requests that were preempted have paid, and come before all others.

    Requests that are admitted in turns get a queue key by the order of their admission: not the latest to arrive is
    preempted first, which a tenant with few requests would always be beside a flood, but the latest that was admitted.

    A request that finds no room is passed by small ones, of any tenant, until these have cost as much as it does. Then
    all wait, so that it finds what others free.

    Attributes:
        num_tokens: Known tokens of all requests.
        num_uncomputed: Tokens of these that are still to be computed, if the prefix cache holds nothing of theirs.
        queued_tokens: Tokens that all requests add to the queue, see `messages.to_engine.queued_tokens`.
        num_deferred: Requests that wait for a token in flight, the prompt they fork from, or what they await, not for
            room.
        num_awaiting: Requests that await something.
    """

    def __init__(self, policy: Policy, expected_output: ExpectedOutput) -> None:
        self._by_key = policy == "priority"
        self._expected_output = expected_output
        self.num_tokens = 0
        self.queued_tokens = 0
        self.num_uncomputed = 0
        self.num_deferred = 0
        self.num_awaiting = 0
        self._requests: dict[int, Request] = {}
        self._shares: dict[int, _Share] = {}
        self._in_flight: dict[int, Request] = {}  # preempted while plans in flight sample for them
        self._without_turns = KeyHeap()  # under `priority` all, else those that were preempted
        self._tenants: dict[str, Tenant] = {}
        self._turns: deque[Tenant] = deque()  # the first has its turn
        self._admissions = itertools.count(1)
        self._passed: dict[int, int] = {}  # tokens that have passed a request, by its id
        self._passing: int | None = None  # the request that small ones pass now

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    # --- the order --------------------------------------------------------------------------------------------------

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

    # --- requests come and go ---------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a request that waits."""
        self._requests[request.id] = request
        self._count(request)
        if not request.awaits:
            self._order(request)

    def hold(self, requests: Iterable[Request], what: str) -> None:
        """Let requests await something from now on, beside what they may await already."""
        for request in requests:
            self._take_out_of_order(request)
            request.awaits.add(what)
            self.refresh(request)

    def release(self, request: Request) -> None:
        """Put a request that awaits nothing any more in its place in the order."""
        self.refresh(request)
        self._order(request)

    def admit(self, request: Request) -> None:
        """Remove a request because it gets a slot. Its queue key may change."""
        if request in self._without_turns:
            self._without_turns.remove(request)
        else:
            tenant, cost = self._tenants[request.add.tenant], self._cost(request)
            if self._passing is not None:
                self._passed[self._passing] = self._passed.get(self._passing, 0) + cost
            tenant.deficit -= cost
            tenant.heap_of[request.id].served += cost
            self._take_from_tenant(request, tenant)
            request.queue_key = float(next(self._admissions)), request.id
        del self._requests[request.id]
        self._discount(request)

    def remove(self, request: Request) -> None:
        """Remove a request because it is over."""
        self._take_out_of_order(request)
        del self._requests[request.id]
        self._discount(request)

    def refresh(self, request: Request) -> None:
        """Update the sums after a request's lengths or its parent have changed."""
        self._discount(request)
        self._count(request)

    def refresh_in_flight(self) -> None:
        """Update the sums after a result was processed, which may have brought tokens of preempted requests."""
        for request in list(self._in_flight.values()):
            self.refresh(request)

    def _order(self, request: Request) -> None:
        if self._by_key or request.preemptions:
            self._without_turns.add(request)
            return
        tenant = self._tenants.get(request.add.tenant)
        if tenant is None:
            tenant = self._tenants[request.add.tenant] = Tenant(request.add.tenant)
            self._turns.append(tenant)
            if len(self._turns) == 1:
                tenant.deficit = QUANTUM
        tenant.add(request, request.add.queued_tokens(self._expected_output.tokens))

    def _take_out_of_order(self, request: Request) -> None:
        self._without_turns.remove(request)
        tenant = self._tenants.get(request.add.tenant)
        if tenant is not None and request.id in tenant.heap_of:
            self._take_from_tenant(request, tenant)

    def _take_from_tenant(self, request: Request, tenant: Tenant) -> None:
        tenant.heap_of.pop(request.id).remove(request)
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

    # --- the sums ---------------------------------------------------------------------------------------------------

    def _cost(self, request: Request) -> int:
        return self._shares[request.id].queued

    def _count(self, request: Request) -> None:
        known, in_flight, awaits = len(request.tokens), request.in_flight_tokens, bool(request.awaits)
        computed = request.planned if request.parent is None else max(request.planned, request.add.prompt_len - 1)
        uncomputed = known + in_flight - computed  # one that was preempted may be planned beyond what is known
        output = min(request.limit - known, self._expected_output.tokens - request.output_len)
        share = _Share(
            known,
            0 if awaits else uncomputed,
            queued_tokens(request.add.sampling, uncomputed, output),
            in_flight > 0 or request.parent is not None or awaits,
            awaits,
        )
        self._shares[request.id] = share
        self._add_to_sums(share, 1)
        if in_flight:
            self._in_flight[request.id] = request

    def _discount(self, request: Request) -> None:
        self._add_to_sums(self._shares.pop(request.id), -1)
        self._in_flight.pop(request.id, None)

    def _add_to_sums(self, share: _Share, sign: int) -> None:
        self.num_tokens += sign * share.tokens
        self.num_uncomputed += sign * share.uncomputed
        self.queued_tokens += sign * share.queued
        self.num_deferred += sign * share.deferred
        self.num_awaiting += sign * share.awaiting
