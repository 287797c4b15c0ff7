"""Which waiting requests get a slot in a step, and what of their tokens is there already.

Chooses; seating them and moving them forward is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.config.scheduler import Policy
from quire.kvcache.pool import BlockPool
from quire.scheduler.budget import Budget
from quire.scheduler.key_lengths import KeyLengths
from quire.scheduler.lengths import Lengths
from quire.scheduler.preempt import Preemption
from quire.scheduler.publishing import Publisher
from quire.scheduler.request import Request
from quire.scheduler.roster import Roster
from quire.scheduler.step import Step


class Admission:
    """Looks at the queue in the order of rank.

    Args:
        pool, num_groups: The KV blocks, and how many groups of layers hold some.
        lengths, roster: Of all requests.
        budget, preemption, policy: See Scheduler.
        publisher: Of what others have computed.
        key_lengths: Of all requests.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_groups: int,
        lengths: Lengths,
        roster: Roster,
        budget: Budget,
        preemption: Preemption,
        policy: Policy,
        publisher: Publisher,
        key_lengths: KeyLengths,
    ) -> None:
        self._pool = pool
        self._num_groups = num_groups
        self._lengths = lengths
        self._roster = roster
        self._budget = budget
        self._preemption = preemption
        self._policy = policy
        self._publisher = publisher
        self._key_lengths = key_lengths

    def outranked(self, step: Step) -> Iterator[Request]:
        """Under `priority`, running requests of a higher number whose place the first in the queue takes. Each must be
        put back before the next is asked for."""
        waiting, running = self._roster.waiting, self._roster.running
        if self._policy != "priority" or not waiting:
            return
        urgent = waiting[0]
        if not self._is_ready(urgent, step):
            return
        needed = self._missing(urgent)
        while running and (not self._roster.free_slots or needed > self._pool.num_free):
            victim = running[-1]
            if victim.add.priority <= urgent.add.priority or victim.rank <= urgent.rank:
                return
            yield victim

    def admitted(self, step: Step) -> Iterator[Request]:
        """Waiting requests that get slots, while rows, tokens, time and blocks last; the first that does not fit waits
        with all. Each must be seated and moved before the next is asked for."""
        roster = self._roster
        if not roster.waiting or not roster.free_slots:
            return
        promised = self._promised()
        for request in list(roster.waiting):
            if not roster.free_slots or not self._budget.has_room(step.tokens):
                return
            if not self._is_ready(request, step):
                continue
            if not self._fits(request, promised, step):
                return
            yield request
            promised += self._missing(request)

    def _missing(self, request: Request) -> int:
        """Blocks that it still needs for the tokens it has."""
        return request.table.missing(len(request.tokens), self._budget.max_tokens)

    def _promised(self) -> int:
        """Blocks that running requests still need for tokens they already have."""
        lengths, running = self._lengths, self._roster.running
        if not running:
            return 0
        behind = (lengths.planned[running.rows] < lengths.known[running.rows]).nonzero()[0].tolist()
        return sum(self._missing(running[index]) for index in behind)

    def _is_ready(self, request: Request, step: Step) -> bool:
        """Whether what it awaits is there: its own next token (it was put back while a plan in flight draws it), or the
        prompt of the request it forks from."""
        parent = request.parent
        if parent is not None and (parent.ended is not None or parent.preemptions):
            request.parent = parent = None  # it goes its own way, by the prefix cache
        forkable = parent is None or 0 < parent.prompt_step < step.number
        return not request.drawing and forkable

    def _fits(self, request: Request, promised: int, step: Step) -> bool:
        """Give a waiting request what is there of its tokens, if the rest of them has blocks and time as well."""
        if not self._budget.has_time(self._least_ahead(request)):
            return False
        if request.swapped:
            room = self._missing(request) + promised <= self._pool.num_free
            return room and self._preemption.bring_back(request, step)
        self._key_lengths.count(request)
        start, to_copy = self._find_computed(request)
        has_room = self._missing(request) + to_copy + promised <= self._pool.num_free
        if not has_room or not self._budget.has_time(len(request.tokens) - start):
            request.table.release()
            return False
        request.start_at(start)
        return True

    def _least_ahead(self, request: Request) -> int:
        """Tokens that it is behind, whatever may be found of it: of others, no more than whole blocks."""
        if request.swapped:
            return request.ahead
        return 1 if request.parent is not None else (len(request.tokens) - 1) % self._pool.block_size + 1

    def _find_computed(self, request: Request) -> tuple[int, int]:
        """Let its table hold what others have computed: how many tokens, at most all but one; and how many blocks of
        these must be copied before it can write."""
        parent, prompt_len = request.parent, request.add.prompt_len
        if parent is not None and parent.table.covers(prompt_len - 1):
            request.table.fork(parent.table, prompt_len)
            request.hashes = parent.hashes.branch(prompt_len)
            self._lengths.room[parent.row] = 0  # its last block is shared now: it asks before it writes
            return prompt_len - 1, self._num_groups
        if not self._publisher.enabled or not request.reads_cache:
            return 0, 0
        self._publisher.catch_up()
        most = len(request.tokens) - 1
        return request.table.adopt(request.hashes.each(request.tokens, most), most), 0
