"""The scheduler: plan() says who moves forward by how many tokens, settle() what the result means for each request.

There are no phases: a prompt, a chunk of one and a single token are only values of n. Plans may be made before the
results of earlier ones are known (the tokens are in the device's slot table); an end that is found at settle costs the
one row already planned. Knows nothing about processes, clients or tensors.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.clock import Clock
from quire.kvcache.groups import FULL, GroupReach
from quire.kvcache.pool import BlockPool
from quire.kvcache.prefix import PrefixHashes
from quire.kvcache.table import BlockTable, Reservation
from quire.messages import Add, Plan, Result, TokenLogprobs
from quire.scheduler.budget import Budget
from quire.scheduler.preempt import Preemption
from quire.scheduler.request import Request
from quire.scheduler.step import Row, Step
from quire.scheduler.waiting import Policy, RankedRequests, rank_of


class Gain(NamedTuple):
    """What a settled step brought to one request: a token, or its end, or both."""

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None


@dataclass
class Tally:
    """Counts since the start."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Scheduler:
    """Continuous batching over a pool of KV blocks.

    Args:
        pool: The KV blocks.
        max_num_seqs: Slots, so also the most rows of a step.
        budget: What one step may hold.
        preemption: How running requests are put back.
        clock: For the times in a request's last message.
        groups: The model's KV groups.
        policy: Who goes first.
        prefix_caching: Whether requests share what others have computed.

    Attributes:
        pool, host: KV blocks of the device and of the host.
        num_slots: Most requests that run at once.
        tally: Counts since the start.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        budget: Budget,
        preemption: Preemption,
        clock: Clock,
        *,
        groups: Sequence[GroupReach] = FULL,
        policy: Policy = "fcfs",
        prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.host = preemption.host
        self.num_slots = max_num_seqs
        self._budget = budget
        self._preemption = preemption
        self._clock = clock
        self._groups = groups
        self._policy: Policy = policy
        self._prefix_caching = prefix_caching
        self._requests: dict[int, Request] = {}
        self._waiting = RankedRequests()
        self._running = RankedRequests()
        self._free_slots = list(range(max_num_seqs))  # a heap: low slots first keeps the device's reads dense
        self._flights: deque[Step] = deque()
        self._next_step = 1
        self.tally = Tally()

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

    def requests(self) -> Iterable[Request]:
        """All that are not over."""
        return self._requests.values()

    # --- requests come and go ---------------------------------------------------------------------------------------

    def add(self, message: Add) -> None:
        """A new request joins the queue."""
        table = BlockTable(self.pool, self._groups)
        hashes = PrefixHashes(self.pool.block_size, message.cache_salt)
        request = Request(message, table, hashes, rank_of(message, self._policy))
        request.parent = None if message.fork_of is None else self._requests.get(message.fork_of)
        self._requests[request.id] = request
        self._waiting.add(request)

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
        self._yield_to_urgent(step)
        self._budget.open(self._running)
        self._move_running(step)
        if not step.crowded:
            self._admit_waiting(step)
        if not step.rows and not step.swap_out:
            return None
        self._next_step += 1
        self._flights.append(step)
        return step.plan()

    def _move_running(self, step: Step) -> None:
        """Every running request moves forward as far as the budget goes, in the order of rank."""
        index = 0
        while index < len(self._running):
            request = self._running[index]
            index += 1
            count = self._budget.grant(request, step.tokens)
            if count == 0:
                continue
            reservation = self._reserve(request, count, step)
            if reservation is None:
                return  # it was the last one running and put itself back
            self._move(request, count, reservation, step)

    def _reserve(self, request: Request, count: int, step: Step) -> Reservation | None:
        """Room for `count` tokens, if need be from the last in rank; None when that is `request` itself."""
        request.table.leave_behind(request.planned)
        while (reservation := request.table.reserve(request.planned, request.planned + count)) is None:
            victim = self._running[-1]
            self._put_back(victim, step)
            step.crowded = True
            if victim is request:
                return None
        return reservation

    def _move(self, request: Request, count: int, reservation: Reservation, step: Step) -> None:
        step.move(request, count, reservation)
        if self._prefix_caching:  # already now: a step's keys are written before they are read, also by its other rows
            request.table.publish(request.full_hashes())

    def _put_back(self, victim: Request, step: Step) -> None:
        """Take the victim's slot and blocks; it waits for its turn again."""
        self._running.remove(victim)
        self._free_slot(victim)
        self._preemption.put_back(victim, step)
        self._waiting.add(victim)
        self.tally.preemptions += 1

    # --- admission --------------------------------------------------------------------------------------------------

    def _yield_to_urgent(self, step: Step) -> None:
        """Under `priority`, the first in the queue takes the place of running requests of a higher number."""
        if self._policy != "priority" or not self._waiting:
            return
        urgent = self._waiting[0]
        if not self._is_ready(urgent, step):
            return
        needed = urgent.table.missing(len(urgent.tokens), self._budget.max_tokens)
        while self._running and (not self._free_slots or needed > self.pool.num_free):
            victim = self._running[-1]
            if victim.add.priority <= urgent.add.priority or victim.rank <= urgent.rank:
                return
            self._put_back(victim, step)

    def _admit_waiting(self, step: Step) -> None:
        """Waiting requests get slots while rows, tokens and blocks last; the first that does not fit waits with all."""
        promised = sum(
            r.table.missing(len(r.tokens), self._budget.max_tokens) for r in self._running if r.planned < len(r.tokens)
        )
        for request in list(self._waiting):
            if not self._free_slots or step.tokens >= self._budget.max_tokens:
                return
            if not self._is_ready(request, step):
                continue
            if not self._fits(request, promised, step):
                return
            self._waiting.remove(request)
            self._admit(request, step)
            promised += request.table.missing(len(request.tokens), self._budget.max_tokens)

    def _is_ready(self, request: Request, step: Step) -> bool:
        """Whether what it awaits is there: its own next token (it was put back while a plan in flight draws it), or the
        prompt of the request it forks from."""
        parent = request.parent
        if parent is not None and (parent.ended is not None or parent.preemptions):
            request.parent = parent = None  # it goes its own way, by the prefix cache
        forkable = parent is None or 0 < parent.prompt_step < step.number
        return not request.drawing and forkable

    def _fits(self, request: Request, promised: int, step: Step) -> bool:
        """Give a waiting request what is there of its tokens, if blocks for the rest of them are free as well."""
        if request.swapped:
            needed = request.table.missing(len(request.tokens), self._budget.max_tokens)
            return needed + promised <= self.pool.num_free and self._preemption.bring_back(request, step)
        start, to_copy = self._find_computed(request)
        needed = request.table.missing(len(request.tokens), self._budget.max_tokens) + to_copy
        if needed + promised > self.pool.num_free:
            request.table.release()
            return False
        request.start_at(start)
        return True

    def _find_computed(self, request: Request) -> tuple[int, int]:
        """Let its table hold what others have computed: how many tokens, at most all but one; and how many blocks of
        these must be copied before it can write."""
        parent, prompt_len = request.parent, request.add.prompt_len
        if parent is not None and parent.table.covers(prompt_len - 1):
            request.table.fork(parent.table, prompt_len)
            request.hashes = parent.hashes.branch(prompt_len)
            return prompt_len - 1, len(self._groups)
        if not self._prefix_caching:
            return 0, 0
        return request.table.adopt(request.hashes.upto(request.tokens, len(request.tokens) - 1)), 0

    def _admit(self, request: Request, step: Step) -> None:
        request.slot = heapq.heappop(self._free_slots)
        if request.admitted_at is None:
            request.admitted_at = self._clock.now()
            self.tally.prefix_queries += len(request.tokens)
            self.tally.prefix_hits += request.planned
        self._running.add(request)
        step.admit(request)
        count = self._budget.grant(request, step.tokens)
        reservation = request.table.reserve(request.planned, request.planned + count)
        assert reservation is not None, "blocks were counted before"
        self._move(request, count, reservation, step)

    # --- settle -----------------------------------------------------------------------------------------------------

    def settle(self, result: Result) -> list[Gain]:
        """Take in the oldest plan's result: tokens are appended, ends found, slots and blocks of the ended freed."""
        step = self._flights.popleft()
        assert result.step == step.number, f"result of step {result.step}, expected {step.number}"
        self._budget.learn(step, result.device_ms)
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
            request.table.disown_contents()
            request.end("error", error)
        elif self._prefix_caching and request.slot is not None:
            request.table.publish(request.full_hashes())
        if request.ended is not None:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Take back what an ended request holds."""
        del self._requests[request.id]
        request.parent = None
        if request.slot is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._free_slot(request)
        if request.swapped:
            self._preemption.drop(request)
        request.table.release()

    def _free_slot(self, request: Request) -> None:
        assert request.slot is not None
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None
