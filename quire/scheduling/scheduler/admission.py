"""Which waiting requests get a slot in a step, and which of their tokens are computed already.

Decides; the scheduler assigns slots and moves requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.foundation.config.scheduler import Policy
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.block_table import PrefixMatch
from quire.scheduling.scheduler.encoder_cache import EncoderCache
from quire.scheduling.scheduler.lengths import Lengths
from quire.scheduling.scheduler.preemption import Preemption
from quire.scheduling.scheduler.prefix_caching import PrefixCacher
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.request_table import RequestTable
from quire.scheduling.scheduler.rope_lengths import RopeLengths
from quire.scheduling.scheduler.step import Step
from quire.scheduling.scheduler.token_budget import TokenBudget

BLOCKS = "blocks"
"""What a request awaits while blocks of its prefix come from a tier."""
MAX_LOADS = 5
"""So often a request awaits blocks before it runs: from a disk to the host and on to the device, and again where others
have taken those that had come."""


@dataclass(frozen=True)
class _FailedAdmission:
    """Why a request was not admitted: its parent then, the free blocks that it needed, and the tokens that it had to
    compute."""

    request: Request
    parent: Request | None
    blocks: int
    uncomputed: int


class Admission:
    """Decides about one request at a time. `num_groups` is how many KV groups hold blocks of `pool`; `states` is the
    pool of states, if the model has any, and `media` says which images a step has room for, if it sees any."""

    def __init__(
        self,
        pool: BlockPool,
        num_groups: int,
        lengths: Lengths,
        request_table: RequestTable,
        budget: TokenBudget,
        preemption: Preemption,
        policy: Policy,
        prefix_cacher: PrefixCacher,
        rope_lengths: RopeLengths,
        states: BlockPool | None = None,
        media: EncoderCache | None = None,
    ) -> None:
        self._pool = pool
        self._states = states
        self._media = media
        self._num_groups = num_groups
        self._lengths = lengths
        self._request_table = request_table
        self._budget = budget
        self._preemption = preemption
        self._policy = policy
        self._prefix_cacher = prefix_cacher
        self._rope_lengths = rope_lengths
        self._last_failed: _FailedAdmission | None = None

    def priority_victim(self, step: Step) -> Request | None:
        """Under `priority`, the running request to preempt for the first in the queue: the last one, if it has a higher
        priority number and the first lacks a slot or blocks. Asked again after each preemption."""
        waiting, running = self._request_table.waiting, self._request_table.running
        if self._policy != "priority" or not waiting or not running:
            return None
        urgent, last = waiting.first, running[-1]
        if urgent is None:  # all await something
            return None
        if last.add.priority <= urgent.add.priority or last.queue_key <= urgent.queue_key:
            return None
        if not self.is_ready(urgent, step):
            return None
        has_room = self._request_table.num_free_slots and self.num_blocks_to_allocate(urgent) <= self._pool.num_free
        return None if has_room else last

    def num_blocks_to_allocate(self, request: Request) -> int:
        """Blocks that a request still needs for the tokens it has."""
        return request.table.num_blocks_to_allocate(len(request.tokens), self._budget.step_tokens)

    def num_reserved_blocks(self) -> int:
        """Blocks that running requests still need for the tokens they have."""
        lengths, running = self._lengths, self._request_table.running
        if not running:
            return 0
        behind = (lengths.planned[running.indices] < lengths.known[running.indices]).nonzero()[0].tolist()
        return sum(self.num_blocks_to_allocate(running[place]) for place in behind)

    def is_ready(self, request: Request, step: Step) -> bool:
        """Whether a request waits for room only: not for a token in flight (it was preempted meanwhile), nor for the
        prompt of the request it forks from."""
        parent = request.parent
        if parent is not None and (parent.ended is not None or parent.preemptions):
            request.parent = parent = None  # it computes its own prompt, or finds it in the prefix cache
            self._request_table.waiting.refresh(request)
        can_fork = parent is None or 0 < parent.prompt_step < step.number
        return not request.in_flight_tokens and can_fork

    def is_ready_next(self, request: Request, step: Step) -> bool:
        """Whether a request that is not ready waits for a prompt that this step completes: a slot is held for it, as a
        prompt's choices begin together."""
        return request.parent is not None and request.parent.prompt_step == step.number

    def try_admit(self, request: Request, reserved: int, step: Step, *, passing: bool = False) -> bool:
        """Swap a waiting request in or let it share computed blocks, if there are blocks and time for its other tokens.

        Args:
            reserved: Blocks that others need for the tokens they have.
            passing: Whether it is small and passes a request that found no room, of which is remembered why.
        """
        if not self._budget.has_time(self._min_uncomputed(request)) or not self._budget.fits(request, step.tokens):
            return False
        if request.swapped:
            room = self.num_blocks_to_allocate(request) + reserved <= self._pool.num_free
            return room and self._can_begin(request, request.num_uncomputed) and self._preemption.swap_in(request, step)
        if self._would_fail_again(request, reserved):
            return False
        self._rope_lengths.assign(request)
        if request.parent is not None and self._can_share_prompt(request.parent, request.add.prompt_len):
            return self._try_fork(request, request.parent, reserved, remember=not passing)
        return self._try_share_prefix(request, reserved, remember=not passing)

    @staticmethod
    def _can_share_prompt(parent: Request, prompt_len: int) -> bool:
        """Whether a request still holds all that its prompt's last token sees."""
        has_state = parent.states is None or parent.states.fork > 0
        return has_state and parent.table.covers(prompt_len - 1)

    def _min_uncomputed(self, request: Request) -> int:
        """Tokens that a request has to compute at least: the prefix cache holds whole blocks only."""
        if request.swapped:
            return request.num_uncomputed
        return 1 if request.parent is not None else (len(request.tokens) - 1) % self._pool.block_size + 1

    def _try_fork(self, request: Request, parent: Request, reserved: int, *, remember: bool = True) -> bool:
        """Share the parent's prompt: all but its last token, which is computed again to sample from."""
        prompt_len = request.add.prompt_len
        shared = parent.table.num_blocks_within(prompt_len)
        to_copy = self._num_groups  # the last block of each group, before the request writes to it
        blocks = max(0, self.num_blocks_to_allocate(request) - shared) + to_copy
        uncomputed = len(request.tokens) - prompt_len + 1
        if not self._fits(request, blocks, uncomputed, reserved, remember=remember):
            return False
        request.table.fork(parent.table, prompt_len)
        if request.states is not None and parent.states is not None:
            request.states.source = parent.states.fork
        request.block_hashes = parent.block_hashes.branch(prompt_len)
        self._lengths.allocated[parent.index] = 0  # its last block is shared now, so it must reserve before writing
        request.set_computed(prompt_len - 1)
        return True

    def _try_share_prefix(self, request: Request, reserved: int, *, remember: bool = True) -> bool:
        """Share what the prefix cache holds: at most all but the last token, which is computed to sample from. What a
        tier has of it is loaded before, and the request awaits it."""
        most = len(request.tokens) - 1 if self._prefix_cacher.enabled and request.reads_cache else 0
        self._prefix_cacher.cache_pending()
        match, is_near = self._match(request, most)
        shared = match.held_blocks
        # Shared blocks that are free now are not allocated, but not free any more either.
        blocks = max(0, self.num_blocks_to_allocate(request) - len(shared)) + self._pool.num_free_of(shared)
        uncomputed = len(request.tokens) - match.num_tokens
        if not self._fits(request, blocks, uncomputed, reserved, match, remember=remember):
            return False
        tier = self._preemption.tier
        if tier is not None and not is_near:
            tier.begin_load(request.id, match.host_blocks, shared)
            request.loads += 1
            self._request_table.waiting.hold([request], BLOCKS)
            return False
        request.table.share_prefix(match)
        if tier is not None:
            loaded = 0 if request.near_tokens is None else max(0, match.num_tokens - request.near_tokens)
            tier.stats.query_tokens += uncomputed + loaded
            tier.stats.hit_tokens += loaded
            request.near_tokens = None
        if request.states is not None:
            request.states.source = match.state
        request.set_computed(match.num_tokens)
        return True

    def _match(self, request: Request, most: int) -> tuple[PrefixMatch, bool]:
        """Look up the prefix of a request: what is on the device, or with the tier's blocks where loading them pays.
        Returns whether all of it is on the device."""
        match = request.table.match_prefix(request.block_hashes.iter_hashes(request.tokens, most), most)
        tier = self._preemption.tier
        if tier is None or request.loads >= MAX_LOADS or not (tier.host.num_cached or tier.disk.num_cached):
            return match, True
        if most - match.num_tokens < self._pool.block_size:  # there is nothing more to find
            return match, True
        for lookup in tier.lookups:
            far = request.table.match_prefix(request.block_hashes.iter_hashes(request.tokens, most), most, lookup)
            if self._preemption.pays(match, far):
                if request.near_tokens is None:
                    request.near_tokens = match.num_tokens
                return far, False
        return match, True

    def _fits(
        self,
        request: Request,
        blocks: int,
        uncomputed: int,
        reserved: int,
        match: PrefixMatch | None = None,
        *,
        remember: bool = True,
    ) -> bool:
        """Whether there are blocks and time for a request. If not, what it lacks can be remembered."""
        has_room = blocks + reserved <= self._pool.num_free and self._budget.has_time(uncomputed)
        if has_room and self._can_begin(request, uncomputed):
            self._last_failed = None
            return True
        if remember:
            self._last_failed = _FailedAdmission(request, request.parent, blocks, uncomputed)
            self._pool.watch(() if match is None else match.missing)
            if self._states is not None:
                self._states.watch(() if match is None else match.missing_states)
        return False

    def _can_begin(self, request: Request, uncomputed: int) -> bool:
        return self._media is None or self._media.can_begin(request, len(request.tokens) - uncomputed)

    def _would_fail_again(self, request: Request, reserved: int) -> bool:
        """Whether a request that did not fit cannot fit now either, so that no lookup in the prefix cache is needed.

        As long as no more of it is cached, it needs at least as many free blocks and as much time as before. It may
        need more: blocks of its prefix are evicted, or freed by their last holder (which adds them to `num_free`). The
        next lookup will find that. It does not need less, as no other request that shares its prefix was admitted: that
        would have replaced what is remembered here. Only with windows or chunks it may, where a shorter prefix is held
        by others and the longer one was evicted: then it waits until as many blocks are free as it needed before.
        """
        failed = self._last_failed
        if failed is None or failed.request is not request or failed.parent is not request.parent:
            return False
        self._prefix_cacher.cache_pending()
        if self._pool.has_cached_watched or (self._states is not None and self._states.has_cached_watched):
            return False
        return failed.blocks + reserved > self._pool.num_free or not self._budget.has_time(failed.uncomputed)
