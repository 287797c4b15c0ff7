"""Which waiting requests get a slot in a step, and which of their tokens are computed already.

Decides; the scheduler assigns slots and moves requests.
"""

from __future__ import annotations

from quire.config.scheduler import Policy
from quire.kvcache.block_pool import BlockPool
from quire.scheduler.budget import Budget
from quire.scheduler.lengths import Lengths
from quire.scheduler.preemption import Preemption
from quire.scheduler.prefix_caching import PrefixCacher
from quire.scheduler.request import Request
from quire.scheduler.request_table import RequestTable
from quire.scheduler.rope_lengths import RopeLengths
from quire.scheduler.step import Step


class Admission:
    """Decides about one request at a time.

    Args:
        pool, num_groups: The KV blocks, and how many groups of layers hold some.
        lengths, request_table: Of all requests.
        budget, preemption, policy: See Scheduler.
        prefix_cacher, rope_lengths: Of all requests.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_groups: int,
        lengths: Lengths,
        request_table: RequestTable,
        budget: Budget,
        preemption: Preemption,
        policy: Policy,
        prefix_cacher: PrefixCacher,
        rope_lengths: RopeLengths,
    ) -> None:
        self._pool = pool
        self._num_groups = num_groups
        self._lengths = lengths
        self._request_table = request_table
        self._budget = budget
        self._preemption = preemption
        self._policy = policy
        self._prefix_cacher = prefix_cacher
        self._rope_lengths = rope_lengths

    def priority_victim(self, step: Step) -> Request | None:
        """Under `priority`, the running request to preempt for the first in the queue: the last one, if it has a higher
        priority number and the first lacks a slot or blocks. Asked again after each preemption."""
        waiting, running = self._request_table.waiting, self._request_table.running
        if self._policy != "priority" or not waiting or not running:
            return None
        urgent, last = waiting[0], running[-1]
        if last.add.priority <= urgent.add.priority or last.queue_key <= urgent.queue_key:
            return None
        if not self.is_ready(urgent, step):
            return None
        has_room = self._request_table.num_free_slots and self.num_blocks_to_allocate(urgent) <= self._pool.num_free
        return None if has_room else last

    def num_blocks_to_allocate(self, request: Request) -> int:
        """Blocks that it still needs for the tokens it has."""
        return request.table.num_blocks_to_allocate(len(request.tokens), self._budget.max_tokens)

    def num_promised_blocks(self) -> int:
        """Blocks that running requests still need for the tokens they have."""
        lengths, running = self._lengths, self._request_table.running
        if not running:
            return 0
        behind = (lengths.planned[running.indices] < lengths.known[running.indices]).nonzero()[0].tolist()
        return sum(self.num_blocks_to_allocate(running[place]) for place in behind)

    def is_ready(self, request: Request, step: Step) -> bool:
        """Whether it waits for room only: not for a token in flight (it was preempted meanwhile), nor for the prompt of
        the request it forks from."""
        parent = request.parent
        if parent is not None and (parent.ended is not None or parent.preemptions):
            request.parent = parent = None  # it computes its own prompt, or finds it in the prefix cache
        can_fork = parent is None or 0 < parent.prompt_step < step.number
        return not request.in_flight_tokens and can_fork

    def try_admit(self, request: Request, promised: int, step: Step) -> bool:
        """Swap a waiting request in or let it share computed blocks, if there are blocks and time for its other tokens.

        Args:
            promised: Blocks that others need for the tokens they have.
        """
        if not self._budget.has_time(self._min_uncomputed(request)):
            return False
        if request.swapped:
            room = self.num_blocks_to_allocate(request) + promised <= self._pool.num_free
            return room and self._preemption.swap_in(request, step)
        self._rope_lengths.assign(request)
        start, to_copy = self._share_computed(request)
        has_room = self.num_blocks_to_allocate(request) + to_copy + promised <= self._pool.num_free
        if not has_room or not self._budget.has_time(len(request.tokens) - start):
            request.table.free()
            return False
        request.set_computed(start)
        return True

    def _min_uncomputed(self, request: Request) -> int:
        """Tokens that it has to compute at least: the prefix cache holds whole blocks only."""
        if request.swapped:
            return request.num_new_tokens
        return 1 if request.parent is not None else (len(request.tokens) - 1) % self._pool.block_size + 1

    def _share_computed(self, request: Request) -> tuple[int, int]:
        """Share blocks that others have computed. How many tokens they hold, at most all but the last; and how many of
        the blocks must be copied before the request can write."""
        parent, prompt_len = request.parent, request.add.prompt_len
        if parent is not None and parent.table.covers(prompt_len - 1):
            request.table.fork(parent.table, prompt_len)
            request.block_hashes = parent.block_hashes.branch(prompt_len)
            self._lengths.allocated[parent.index] = 0  # its last block is shared now, so it must reserve before writing
            return prompt_len - 1, self._num_groups
        if not self._prefix_cacher.enabled or not request.reads_cache:
            return 0, 0
        self._prefix_cacher.cache_deferred()
        most = len(request.tokens) - 1
        return request.table.match_prefix(request.block_hashes.each(request.tokens, most), most), 0
