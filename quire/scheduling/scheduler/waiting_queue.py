"""The queue of requests without a slot, and sums over it for the load.

Adding costs O(log n), looking at the first and reading the sums O(1). Knows nothing about slots, blocks or budgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quire.foundation.config.scheduler import Policy
from quire.foundation.messages.to_engine import queued_tokens
from quire.scheduling.scheduler.queue_order import QueueOrder
from quire.scheduling.scheduler.request import ExpectedOutput, Request


class _Share(NamedTuple):
    """A request's share of the sums."""

    tokens: int
    uncomputed: int
    queued: int
    deferred: bool
    awaiting: bool


class WaitingQueue:
    """Requests in the order of service: under `priority` by queue key, else in turns of tenants.

    Args:
        policy: See Scheduler.
        expected_output: How long outputs are expected to be.

    Attributes:
        num_tokens: Known tokens of all requests.
        num_uncomputed: Tokens of these that are still to be computed, if the prefix cache holds nothing of theirs.
        queued_tokens: What all requests add to the queue, see `messages.to_engine.queued_tokens`.
        num_deferred: Requests that wait for a token in flight, the prompt they fork from, or what they await, not for
            room.
        num_awaiting: Requests that await something, see Request. They hold nobody: `first` passes over them.
    """

    def __init__(self, policy: Policy, expected_output: ExpectedOutput) -> None:
        self._expected_output = expected_output
        self.num_tokens = 0
        self.queued_tokens = 0
        self.num_uncomputed = 0
        self.num_deferred = 0
        self.num_awaiting = 0
        self._requests: dict[int, Request] = {}
        self._shares: dict[int, _Share] = {}
        self._order = QueueOrder(policy, self._cost, self._cost_with_forks)
        self._in_flight: dict[int, Request] = {}  # preempted while plans in flight sample for them

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def first(self) -> Request | None:
        """The next request that is not skipped."""
        return self._order.first

    def skip_first(self) -> None:
        """Set the first request aside until `restore_skipped`."""
        self._order.skip_first()

    def pass_over_large(self) -> bool:
        """Let small requests pass the first one, which finds no room. Returns whether any may, see `QueueOrder`."""
        return self._order.pass_over_large()

    def restore_skipped(self) -> None:
        """Put requests that were skipped or passed back in their places."""
        self._order.restore_skipped()

    def add(self, request: Request) -> None:
        """Add a request that waits."""
        self._requests[request.id] = request
        self._count(request)
        if not request.awaits:
            self._order.add(request)

    def hold(self, requests: Iterable[Request], what: str) -> None:
        """Let requests await something from now on, beside what they may await already."""
        for request in requests:
            self._order.remove(request)
            request.awaits.add(what)
            self.refresh(request)

    def release(self, request: Request) -> None:
        """Put a request that awaits nothing any more in its place in the order."""
        self.refresh(request)
        self._order.add(request)

    def admit(self, request: Request) -> None:
        """Remove a request because it gets a slot."""
        del self._requests[request.id]
        self._order.admit(request)
        self._discount(request)

    def remove(self, request: Request) -> None:
        """Remove a request because it is over."""
        del self._requests[request.id]
        self._order.remove(request)
        self._discount(request)

    def refresh(self, request: Request) -> None:
        """Update the sums after a request's lengths or its parent have changed."""
        self._discount(request)
        self._count(request)

    def refresh_in_flight(self) -> None:
        """Update the sums after a result was processed, which may have brought tokens of preempted requests."""
        for request in list(self._in_flight.values()):
            self.refresh(request)

    def _cost(self, request: Request) -> int:
        return self._shares[request.id].queued

    def _cost_with_forks(self, request: Request) -> int:
        return request.add.queued_tokens(self._expected_output.tokens)

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
