"""The scheduler: plan() says who moves forward by how many tokens, settle() what the result means for each request.

There are no phases: a prompt, a chunk of one and a single token are only values of n. Plans may be made before the
results of earlier ones are known (the tokens are in the device's slot table); an end that is found at settle costs the
one row already planned. Knows nothing about processes, clients or tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.clock import Clock
from quire.config.scheduler import Policy
from quire.kvcache.groups import FULL, GroupReach
from quire.kvcache.keys import KeysByLength
from quire.kvcache.pool import BlockPool
from quire.kvcache.prefix import PrefixHashes
from quire.kvcache.table import BlockTable
from quire.messages import Add, EndReason, Plan, Result
from quire.sampling import SamplingParams
from quire.scheduler.admission import Admission
from quire.scheduler.budget import Budget
from quire.scheduler.key_lengths import KeyLengths
from quire.scheduler.lengths import Column, Lengths
from quire.scheduler.preempt import Preemption
from quire.scheduler.publishing import Publisher
from quire.scheduler.request import Request
from quire.scheduler.roster import Roster
from quire.scheduler.settlement import Gains, Settled, fail, find_ends, gains, settle_lengths
from quire.scheduler.step import Step
from quire.scheduler.waiting import rank_of


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
        keys: How keys depend on their sequence's length, if they do.
        host_bound: Which requests are planned only when the host knows all their tokens; None for none.
        drafts: How many guesses a request's reads may gain beside the token that they draw, at most; None for none.
        masked: Which requests' reads wait for masks; None for none. These have no drafts.

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
        keys: KeysByLength | None = None,
        host_bound: Callable[[SamplingParams], bool] | None = None,
        drafts: Callable[[SamplingParams], int] | None = None,
        masked: Callable[[Add], bool] | None = None,
    ) -> None:
        self.pool = pool
        self.host = preemption.host
        self.num_slots = max_num_seqs
        self._budget = budget
        self._preemption = preemption
        self._clock = clock
        self._groups = groups
        self._windowed = any(group.window is not None for group in groups)
        self._policy: Policy = policy
        self._host_bound = host_bound
        self._drafts = drafts
        self._masked = masked
        self._lengths = Lengths()
        self._roster = Roster(max_num_seqs)
        self._waiting, self._running = self._roster.waiting, self._roster.running
        self._publisher = Publisher(prefix_caching)
        self._key_lengths = KeyLengths(keys, self._lengths, drafts)
        self._admission = Admission(
            pool, len(groups), self._lengths, self._roster, budget, preemption, policy, self._publisher,
            self._key_lengths,
        )  # fmt: skip
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
        return bool(self._roster) or bool(self._flights)

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
        return self._roster.free_slots

    def waiting_tokens(self) -> int:
        """Tokens of waiting requests that are to be computed before their next output."""
        return sum(len(request.tokens) for request in self._waiting)

    @property
    def deferred(self) -> int:
        """Of the waiting requests: those that await a token in flight or the prompt they fork from, not room."""
        return sum(bool(request.drawing) or request.parent is not None for request in self._waiting)

    @property
    def unwritten_tokens(self) -> int:
        """Tokens that would still fit into the blocks that running requests hold: what paging wastes."""
        lengths, rows = self._lengths, self._running.rows
        return int(np.maximum(lengths.room[rows] - lengths.computed[rows], 0).sum()) * len(self._groups)

    def masks_due(self) -> tuple[int, list[int], list[Request]]:
        """The oldest plan in flight, its rows that wait for masks and their requests: all tokens before these reads are
        known, but some of the requests may be over. No rows: none are due."""
        if not self._flights:
            return 0, [], []
        step = self._flights[0]
        return step.number, step.masked, [step.requests[row] for row in step.masked]

    def requests(self) -> Iterable[Request]:
        """All that are not over."""
        return self._roster

    # --- requests come and go ---------------------------------------------------------------------------------------

    def add(self, message: Add, ids: bytes = b"") -> None:
        """A new request joins the queue; `ids` are its tokens as int64, if somebody has them so."""
        parent = None if message.fork_of is None else self._roster.get(message.fork_of)
        table = BlockTable(self.pool, self._groups)
        if parent is None:
            hashes = PrefixHashes(self.pool.block_size, message.cache_salt, ids if self._publisher.enabled else b"")
        else:
            hashes = parent.hashes.branch(message.prompt_len)
        request = Request(message, table, hashes, rank_of(message, self._policy), self._lengths)
        request.parent = parent
        if self._host_bound is not None:
            request.host_bound = self._host_bound(message.sampling)
        request.masked = self._masked is not None and self._masked(message)
        self._key_lengths.limit_drafts(request)
        self._roster.join(request)

    def abort(self, request_id: int) -> Request | None:
        """End a request now; it is in no later plan and its slot and blocks are free. None if it is already over."""
        return self._end(request_id, "abort")

    def fail(self, request_id: int, message: str) -> Request | None:
        """The same, for what went wrong with it; `message` is for the client."""
        return self._end(request_id, "error", message)

    def _end(self, request_id: int, reason: EndReason, message: str = "") -> Request | None:
        request = self._roster.get(request_id)
        if request is not None:
            request.end(reason, message)
            self._retire(request)
        return request

    # --- plan -------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when nobody can move."""
        step = Step(self._next_step, self._lengths, masks=self._masked is not None)
        for request in self._key_lengths.turned_over(self._running):
            self._put_back(request, step, start_over=True)
        for request in self._admission.outranked(step):
            self._put_back(request, step)
        if self._running:
            self._move_running(step)
        else:
            self._budget.open_idle()
        if not step.crowded:
            for request in self._admission.admitted(step):
                self._admit(request, step)
        if not step.requests and not step.swap_out:
            return None
        self._budget.close(step)
        self._next_step += 1
        self._flights.append(step)
        return step.plan()

    def _move_running(self, step: Step) -> None:
        """Every running request moves forward as far as the budget goes, in the order of rank."""
        lengths, rows, requests = self._lengths, self._running.rows, list(self._running)
        planned, length = lengths.planned[rows], lengths.known[rows] + lengths.drawing[rows]
        ahead = np.where(length < lengths.limit[rows], length - planned, 0)
        if self._host_bound is not None:
            ahead[(lengths.held[rows] > 0) & (lengths.drawing[rows] > 0)] = 0
        counts = self._budget.open(planned, ahead, requests, lengths.behind(self._waiting.rows))
        for index in ((counts > 0) & (planned + counts > lengths.room[rows])).nonzero()[0].tolist():
            request = requests[index]
            if request.slot is None or not self._reserve(request, int(counts[index]), step):
                break  # put back, by one before it in rank or by itself: and so is everybody behind it
        if step.crowded:
            counts *= np.fromiter((r.slot is not None for r in requests), dtype=np.int64, count=len(requests))
        moving = counts.nonzero()[0]
        if len(moving) < len(requests):
            requests, rows, counts = [requests[i] for i in moving.tolist()], rows[moving], counts[moving]
        if requests:
            drafts = None if self._drafts is None else self._guess(requests, rows, counts, step)
            self._move(requests, rows, counts, step, drafts)

    def _guess(self, requests: Sequence[Request], rows: Column, counts: Column, step: Step) -> Column | None:
        """How many guesses go with those that move by a single token to their end, as far as tokens and blocks are
        left. None beside a request that waits for room, which would have to wait for longer."""
        if self._waiting and self._roster.free_slots:
            return None
        lengths, planned = self._lengths, self._lengths.planned[rows]
        streams = (counts == 1) & (planned + 1 == lengths.known[rows] + lengths.drawing[rows])
        wanted = np.minimum(lengths.drafts[rows], lengths.limit[rows] - planned - 2)  # one drawn token comes after them
        drafts = self._budget.guess(planned, counts, np.where(streams, wanted, 0))
        most = counts + drafts
        for index in ((drafts > 0) & (planned + most > lengths.room[rows])).nonzero()[0].tolist():
            if not self._take_blocks(requests[index], int(most[index]), step):
                drafts[index] = 0
        return drafts

    def _reserve(self, request: Request, count: int, step: Step) -> bool:
        """Room for `count` tokens, if need be from the last in rank; False when that is `request` itself."""
        while not self._take_blocks(request, count, step):
            victim = self._running[-1]
            self._put_back(victim, step)
            step.crowded = True
            if victim is request:
                return False
        return True

    def _take_blocks(self, request: Request, count: int, step: Step) -> bool:
        """Room for `count` tokens, if blocks are free. What plans in flight draw may be nothing: the window stays where
        the request could still be."""
        planned = request.planned
        if self._windowed:
            request.table.leave_behind(planned - request.drawing)
        reservation = request.table.reserve(planned, planned + count)
        if reservation is None:
            return False
        self._lengths.room[request.row] = request.table.room
        step.reserve(request, reservation)
        return True

    def _move(
        self, requests: Sequence[Request], rows: Column, counts: Column, step: Step, drafts: Column | None = None
    ) -> None:
        for request in step.move(requests, rows, counts, drafts):
            if not request.prompt_step and request.planned >= request.add.prompt_len:
                request.prompt_step = step.number
            self._publisher.note(request)

    def publish(self) -> None:
        """Blocks that planned steps fill are found from now on; see Publisher."""
        self._publisher.catch_up()

    def _put_back(self, victim: Request, step: Step, start_over: bool = False) -> None:
        """Take the victim's slot and blocks; it waits for its turn again, perhaps computed from the start."""
        self._publisher.publish(victim)
        self._roster.unseat(victim)
        self._preemption.put_back(victim, step, start_over)
        self.tally.preemptions += 1

    def _admit(self, request: Request, step: Step) -> None:
        self._roster.seat(request)
        if request.admitted_at is None:
            request.admitted_at = self._clock.now()
            self.tally.prefix_queries += len(request.tokens)
            self.tally.prefix_hits += request.planned
        step.admit(request)
        count = self._budget.grant(request, step.tokens)
        reserved = self._reserve(request, count, step)
        assert reserved and not step.crowded, "blocks were counted before"
        self._move([request], np.array([request.row]), np.array([count]), step)

    # --- settle -----------------------------------------------------------------------------------------------------

    def settle(self, result: Result) -> Settled:
        """Take in the oldest plan's result: tokens are appended, ends found, slots and blocks of the ended freed."""
        step, lengths = self._flights.popleft(), self._lengths
        assert result.step == step.number, f"result of step {result.step}, expected {step.number}"
        self._budget.learn(step, result.device_ms)
        of_prompts = list(zip(step.scorers, result.prompt_logprobs, strict=True))
        prompt_logprobs = [(request.id, entries) for request, entries in of_prompts if request.ended is None]
        moved = settle_lengths(step, lengths, result)
        found = gains(step, result, moved.gained)
        cached = self._note_first_tokens(found)
        ended = find_ends(found, lengths, self._roster)
        ended += fail(step, moved.alive, result.errors)
        for request in ended:
            self._retire(request)
        if len(moved.fell):
            self._trim(step, moved.fell)
        ids = [request.id for request in found.requests]
        return Settled(ids, found.counts, found.tokens, found.logprobs, ended, prompt_logprobs, cached)

    def _note_first_tokens(self, found: Gains) -> list[tuple[int, int]]:
        """Who gained a first token, and what was cached for it. Blocks that an output fills are published when it is
        over or put back, not one by one."""
        known = self._lengths.known[found.rows] - (1 if found.one_each else found.counts)
        first = known == self._lengths.prompt[found.rows]
        begun = [found.requests[index] for index in first.nonzero()[0].tolist()]
        for request in begun:
            request.first_token_at = self._clock.now()
        return [(request.id, request.cached) for request in begun if request.cached]

    def _trim(self, step: Step, fell: Column) -> None:
        """Give back blocks that requests had for more than they have got; plans in flight keep what they may need."""
        lengths, size = self._lengths, self.pool.block_size
        spare = set(fell[lengths.room[fell] - lengths.planned[fell] > size].tolist())
        for request in step.requests if spare else ():
            if request.ended is None and request.slot is not None and request.row in spare:
                request.table.trim(request.planned + 1)  # its next token comes there
                lengths.room[request.row] = min(lengths.room[request.row], request.table.room)

    def _retire(self, request: Request) -> None:
        """Take back what an ended request holds."""
        if request.slot is not None and request.ended != "error":
            self._publisher.publish(request)
        self._roster.leave(request)
        if request.swapped:
            self._preemption.drop(request)
        request.parent = None
        request.table.release()
        self._lengths.give_back(request.row)
