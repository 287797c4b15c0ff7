"""The scheduler: plan() says who moves forward by how many tokens, settle() what the result means for each request.

There are no phases: a prompt, a chunk of one and a single token are only values of n. Plans may be made before the
results of earlier ones are known (the tokens are in the device's slot table); an end that is found at settle costs the
one row already planned. Knows nothing about processes, clients or tensors.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple

from quire.clock import Clock
from quire.kvcache.pool import BlockPool
from quire.kvcache.table import BlockTable, TableChange
from quire.messages import Add, Plan, Result, TokenLogprobs
from quire.scheduler.request import Request
from quire.scheduler.step import Row, Step
from quire.scheduler.waiting import FirstComeQueue


class Gain(NamedTuple):
    """What a settled step brought to one request: a token, or its end, or both."""

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None


class Scheduler:
    """Continuous batching over a pool of KV blocks, first come, first served.

    Args:
        pool: The KV blocks.
        num_groups: KV groups of the model.
        max_num_seqs: Slots, so also the most rows of a step.
        max_num_batched_tokens: Most tokens of a step.
        clock: For the times in a request's last message.
    """

    def __init__(
        self, pool: BlockPool, num_groups: int, max_num_seqs: int, max_num_batched_tokens: int, clock: Clock
    ) -> None:
        self._pool = pool
        self._num_groups = num_groups
        self._max_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._waiting = FirstComeQueue()
        self._running: list[Request] = []  # in the order of admission
        self._free_slots = list(range(max_num_seqs))  # a heap: low slots first keeps the device's reads dense
        self._flights: deque[Step] = deque()
        self._next_step = 1
        self.preemptions = 0

    # --- state, for the engine's loop, metrics and leak tests -------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Plans whose results are not settled."""
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """Whether any request is not over, or any plan not settled."""
        return bool(self._requests) or bool(self._flights)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests without one."""
        return len(self._waiting)

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free_slots)

    def waiting_tokens(self) -> int:
        """Tokens of waiting requests that are to be computed before their next output."""
        return sum(len(request.tokens) for request in self._waiting)

    def request_ids(self) -> list[int]:
        """Ids of all requests that are not over."""
        return list(self._requests)

    # --- requests come and go ---------------------------------------------------------------------------------------

    def add(self, message: Add) -> None:
        """A new request joins the queue."""
        request = Request(message, BlockTable(self._pool, self._num_groups))
        self._requests[request.id] = request
        self._waiting.push(request)

    def abort(self, request_id: int) -> Request | None:
        """End a request now; it is in no later plan and its slot and blocks are free. None if it is already over."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.end("abort")
        self._retire(request)
        return request

    # --- plan -------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when nobody can move."""
        step = Step(self._next_step)
        preempted = self._move_running(step)
        if not preempted:  # blocks are scarce: whoever was put back goes first, and not in the step that put it back
            self._admit_waiting(step)
        if not step.rows:
            return None
        self._next_step += 1
        self._flights.append(step)
        return step.plan()

    def _move_running(self, step: Step) -> bool:
        """Every running request moves forward as far as the budget goes; whether one had to be put back for it."""
        preemptions = self.preemptions
        index = 0
        while index < len(self._running) and step.tokens < self._max_tokens:
            request = self._running[index]
            index += 1
            count = min(request.ahead, self._max_tokens - step.tokens)
            if count == 0:
                continue
            changes = self._reserve(request, request.planned + count)
            if changes is None:
                break  # it was the last one running and put itself back
            step.move(request, count, changes)
        return self.preemptions > preemptions

    def _reserve(self, request: Request, length: int) -> list[TableChange] | None:
        """Blocks for `length` tokens, if need be from the request admitted last; None when that is `request` itself."""
        while (changes := request.table.grow(length)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return None
        return changes

    def _preempt(self, victim: Request) -> None:
        """Give the victim's slot and blocks back; its known tokens will be computed again."""
        self._running.remove(victim)
        assert victim.slot is not None
        heapq.heappush(self._free_slots, victim.slot)
        victim.put_back()
        self._waiting.push_back(victim)
        self.preemptions += 1

    def _admit_waiting(self, step: Step) -> None:
        """Waiting requests get slots while rows, tokens and blocks last; the first that does not fit waits with all."""
        promised = sum(r.table.missing(len(r.tokens)) for r in self._running if r.planned < len(r.tokens))
        for request in list(self._waiting):
            if not self._free_slots or step.tokens >= self._max_tokens:
                return
            if request.drawing:
                continue  # put back while a plan in flight draws its next token: that must be known first
            needed = request.table.missing(len(request.tokens))
            if needed + promised > self._pool.num_free:
                return
            self._waiting.remove(request)
            self._admit(request, step)
            promised += request.table.missing(len(request.tokens))

    def _admit(self, request: Request, step: Step) -> None:
        request.slot = heapq.heappop(self._free_slots)
        if request.admitted_at is None:
            request.admitted_at = self._clock.now()
        self._running.append(request)
        count = min(request.ahead, self._max_tokens - step.tokens)
        changes = request.table.grow(count)
        assert changes is not None
        step.admit(request)
        step.move(request, count, changes)

    # --- settle -----------------------------------------------------------------------------------------------------

    def settle(self, result: Result) -> list[Gain]:
        """Take in the oldest plan's result: tokens are appended, ends found, slots and blocks of the ended freed."""
        step = self._flights.popleft()
        assert result.step == step.number, f"result of step {result.step}, expected {step.number}"
        errors = dict(result.errors)
        gains: list[Gain] = []
        read = position = 0
        for row in step.rows:
            token, logprobs, error = None, None, None
            if row.draws:
                error = errors.get(read)
                if result.counts[read]:
                    token = result.tokens[position]
                    logprobs = result.logprobs[position] if result.logprobs else None
                    position += 1
                read += 1
            if row.request.ended is None:
                self._settle_row(row, token, error)
                if row.draws:
                    gains.append(Gain(row.request, token, logprobs))
        return gains

    def _settle_row(self, row: Row, token: int | None, error: str | None) -> None:
        request = row.request
        if row.draws and request.first_token_at is None:
            request.first_token_at = self._clock.now()
        request.settle(row.n, row.epoch, row.draws, token)
        if error is not None:
            request.end("error", error)
        if request.ended is not None:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Take back what an ended request holds."""
        del self._requests[request.id]
        if request.slot is None:
            self._waiting.remove(request)
            return
        self._running.remove(request)
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None
        request.table.release()
