"""The scheduler: plan() says who computes how many tokens, process_result() what the result means for each request.

There are no phases: a prompt, a chunk of one and a single token are only values of n. Plans may be made before the
results of earlier ones are known (the tokens are in the device's slot table); a stop that a result brings costs the
one row already planned. Knows nothing about processes, clients or tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quire.foundation.clock import Clock
from quire.foundation.config.scheduler import Policy
from quire.foundation.messages.from_engine import EndReason
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import (
    BlocksLoaded,
    BlocksRead,
    BlocksSaved,
    BlocksStored,
    LoadBlocks,
    OrderDone,
    Plan,
    ReadBlocks,
    Result,
    SaveBlocks,
    StoreBlocks,
)
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduling.kvcache.block_hashes import BlockHashes
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.block_table import BlockTable
from quire.scheduling.kvcache.cache_groups import FULL_ATTENTION, CacheGroup
from quire.scheduling.kvcache.rope_length_mode import RopeLengthMode
from quire.scheduling.scheduler.admission import BLOCKS, MAX_LOADS, Admission
from quire.scheduling.scheduler.encoder_cache import EncoderCache
from quire.scheduling.scheduler.lengths import IntArray, Lengths
from quire.scheduling.scheduler.micro_batches import MicroBatches
from quire.scheduling.scheduler.output_processing import (
    DraftCounts,
    NewTokens,
    StepOutputs,
    append_tokens,
    check_stops,
    fail_rows,
    take_vectors,
    update_lengths,
)
from quire.scheduling.scheduler.preemption import Preemption
from quire.scheduling.scheduler.prefix_caching import PrefixCacher
from quire.scheduling.scheduler.queue_delay import QueueDelay
from quire.scheduling.scheduler.request import Request, ResourcePool
from quire.scheduling.scheduler.request_table import Deadlines, RequestTable
from quire.scheduling.scheduler.rope_lengths import RopeLengths
from quire.scheduling.scheduler.running_queue import RunningQueue, queue_key_of
from quire.scheduling.scheduler.sequence_states import CheckpointRule, SequenceStates
from quire.scheduling.scheduler.step import ScheduledStep, Step
from quire.scheduling.scheduler.token_budget import TokenBudget
from quire.scheduling.scheduler.waiting_queue import WaitingQueue

ADMITTED_TOKENS = 2**20
"""A step takes no more requests once those that it has admitted, or ended because of their deadlines, have this many
known tokens together: each token that a request shares costs the host some 12 ns, so 128 forks of a prompt of 131,072
tokens would take 0.2 s of one turn."""
_ADMISSION_TOKENS = 2**13
"""Tokens that each admission counts as besides, for what it costs: so no step admits more than 128 requests."""


@dataclass
class SchedulerStats:
    """Counts since the start, and how long requests wait."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    speculation: DraftCounts = field(default_factory=DraftCounts)
    queue_delay: QueueDelay = field(default_factory=QueueDelay)


class Scheduler:
    """Continuous batching over a pool of KV blocks.

    Args:
        max_num_seqs: Number of slots, so also the largest number of rows of a step.
        clock: For the times in a request's last message.
        host_bound: Which requests are planned only when the host knows all their tokens; None for none.
        max_drafts: Maximum number of draft tokens in one row of a request; None for no drafts.
        masked: Which requests are sampled under masks; None for none.
        pools_from_cache: Which pooled requests may use the prefix cache: those of which only the last token's state
            counts; None for none.
        stages: How many steps the stages of a pipeline compute at the same time.
        states: The pool of states, in models that keep one a sequence, and where checkpoints are made; None in others.
        media: Which images' vectors the worker keeps; None for models that read text alone.

    Attributes:
        host: KV blocks of the host, which become ready as results say.
        states: The states of requests; None in models without states.
        tier: What the prefix cache keeps on the host; None: nothing.
        resources: Each is told when a request is over or preempted. The engine adds what it gives to requests.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        budget: TokenBudget,
        preemption: Preemption,
        clock: Clock,
        *,
        groups: Sequence[CacheGroup] = FULL_ATTENTION,
        policy: Policy = "fcfs",
        prefix_caching: bool = True,
        shares_blocks: bool = True,
        rope_length_mode: RopeLengthMode | None = None,
        host_bound: Callable[[SamplingParams], bool] | None = None,
        max_drafts: Callable[[SamplingParams], int] | None = None,
        masked: Callable[[Add], bool] | None = None,
        masked_drafts: bool = False,
        pools_from_cache: Callable[[PoolingParams], bool] | None = None,
        stages: int = 1,
        states: tuple[BlockPool, CheckpointRule] | None = None,
        media: EncoderCache | None = None,
    ) -> None:
        self.pool = pool
        self.host = preemption.host
        self.num_slots = max_num_seqs
        self._budget = budget
        self._preemption = preemption
        self.tier = preemption.tier
        self._clock = clock
        self._groups = groups
        self._windowed = any(group.reach.length is not None for group in groups)
        self._policy: Policy = policy
        self._host_bound = host_bound
        self._max_drafts = max_drafts
        self._masked = masked
        self._pools = False  # whether any request has been pooled
        self._pools_from_cache = pools_from_cache
        self._micro_batches = MicroBatches(stages)
        self._lengths = Lengths()
        self._request_table = RequestTable(max_num_seqs, policy)
        self._waiting, self._running = self._request_table.waiting, self._request_table.running
        self._deadlines = Deadlines(self._request_table)
        self._prefix_cacher = PrefixCacher(prefix_caching and shares_blocks)
        self._shares_blocks = shares_blocks
        self._rope_lengths = RopeLengths(rope_length_mode, self._lengths, max_drafts, masked_drafts=masked_drafts)
        self.states: SequenceStates | None = None
        if states is not None:
            rule = replace(states[1], enabled=states[1].enabled and self._prefix_cacher.enabled)
            drafts = max_drafts is not None
            self.states = SequenceStates(states[0], max_num_seqs, rule, self._lengths, drafts=drafts)
            budget.shorteners.append(self.states.chunk_tokens)
        self.media = media
        if media is not None:
            budget.shorteners.append(media.chunk_tokens)
            budget.whole = media.whole
        self._admission = Admission(
            pool, len(groups), self._lengths, self._request_table, budget, preemption, policy, self._prefix_cacher,
            self._rope_lengths, None if self.states is None else self.states.pool, media,
        )  # fmt: skip
        self.resources: list[ResourcePool] = [preemption, self._request_table]
        self._steps_in_flight: deque[ScheduledStep] = deque()
        self._next_step = 1
        self._undrafted = 0  # up to this step the worker makes no drafts
        self.stats = SchedulerStats()

    # --- state, for the engine's loop, metrics and leak tests -------------------------------------------------------

    @property
    def steps_in_flight(self) -> int:
        """Plans whose results are not processed yet."""
        return len(self._steps_in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any request is not over, or any plan in flight."""
        return bool(self._request_table) or bool(self._steps_in_flight)

    @property
    def running(self) -> RunningQueue:
        """Requests with a slot, in queue order."""
        return self._running

    @property
    def waiting(self) -> WaitingQueue:
        """Requests without a slot, which iterates in the order in which they came to wait."""
        return self._waiting

    @property
    def num_free_slots(self) -> int:
        """Slots that no request has."""
        return self._request_table.num_free_slots

    @property
    def expected_output(self) -> float:
        """How many tokens a request is expected to bring."""
        return self._request_table.expected_output.tokens

    @property
    def is_saturated(self) -> bool:
        """Whether requests wait for room."""
        return len(self._waiting) > self._waiting.num_deferred

    @property
    def unwritten_tokens(self) -> int:
        """Tokens that would still fit into the blocks that running requests hold: what paging wastes."""
        lengths, index = self._lengths, self._running.indices
        return int(np.maximum(lengths.allocated[index] - lengths.computed[index], 0).sum()) * len(self._groups)

    def bitmasks_due(self) -> ScheduledStep | None:
        """The oldest plan in flight, if rows of it wait for masks. Some of its requests may be over."""
        return self._steps_in_flight[0] if self._steps_in_flight and self._steps_in_flight[0].masked else None

    def newest_requests(self) -> list[int]:
        """The ids of the requests in the last plan."""
        return [request.id for request in self._steps_in_flight[-1].requests]

    def lengths_of(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Columns of some requests' lengths, by name: `prompt`, `known`, `computed` and `limit`."""
        index = [request.index for request in requests]
        return {name: getattr(self._lengths, name)[index].tolist() for name in ("prompt", "known", "computed", "limit")}

    def requests(self) -> Iterable[Request]:
        """All requests that are not over."""
        return self._request_table

    def get(self, request_id: int) -> Request | None:
        """A request that is not over."""
        return self._request_table.get(request_id)

    # --- requests come and go ---------------------------------------------------------------------------------------

    @property
    def only_awaiting(self) -> bool:
        """Whether every request awaits something that is not there yet."""
        return self._waiting.num_awaiting == len(self._request_table)

    def add(self, message: Add, ids: bytes = b"", awaits: Iterable[str] = ()) -> None:
        """Add a new request, which waits for a slot.

        Args:
            ids: Its tokens as int64 bytes, if the caller has them.
        """
        parent = None
        if message.fork_of is not None and self._shares_blocks:
            parent = self._request_table.get(message.fork_of)
        table = BlockTable(self.pool, self._groups, None if self.states is None else self.states.pool, self.tier)
        if parent is None:
            adapter = message.adapter.digest if message.adapter else ""
            head = ids if self._prefix_cacher.enabled else b""
            source = message.source.digest if message.source else b""
            hashes = BlockHashes(self.pool.block_size, message.cache_salt, head, adapter, message.media, source)
        else:
            hashes = parent.block_hashes.branch(message.prompt_len)
        request = Request(message, table, hashes, queue_key_of(message, self._policy), self._lengths)
        request.parent = parent
        if self.states is not None:
            self.states.add(request)
        if self._host_bound is not None:
            request.host_bound = self._host_bound(message.sampling)
        request.masked = self._masked is not None and self._masked(message)
        if message.pooling is not None:
            self._pools = True
            may_share = self._pools_from_cache is not None and self._pools_from_cache(message.pooling)
            request.skips_cache = not may_share or bool(message.pooling.skip_reading_prefix_cache)
        request.awaits.update(awaits)
        self._rope_lengths.limit_drafts(request)
        self._request_table.add(request)
        self._deadlines.add(request)

    def hold_new(self, what: str) -> list[int]:
        """Let all requests that were never admitted await `what`, except forks of one that was. Returns their ids."""
        waiting = self._waiting
        held = [each for each in waiting if each.admitted_at is None and (
            each.parent is None or each.parent.admitted_at is None
        )]  # fmt: skip
        waiting.hold(held, what)
        return [request.id for request in held]

    def hold_all(self, what: str) -> None:
        """Let no request run until `what` has arrived: all await it, and those that run are preempted."""
        for request in list(self._running):
            self._preempt(request)
        self._waiting.hold([request for request in self._waiting if what not in request.awaits], what)

    def arrived(self, request_id: int, what: str) -> None:
        """Record that something a request awaits is there. It can be admitted once all of it is."""
        request = self._request_table.get(request_id)
        if request is not None and what in request.awaits:
            request.awaits.remove(what)
            if not request.awaits:
                self._waiting.release(request)

    @property
    def moves_blocks(self) -> bool:
        """Whether orders to move blocks are under way."""
        return self.tier is not None and self.tier.num_orders > 0

    def take_orders(self) -> list[LoadBlocks | ReadBlocks | SaveBlocks | StoreBlocks]:
        """Return orders to move blocks, which the workers are to be given behind the plans that were made."""
        return [] if self.tier is None else self.tier.take_orders()

    def moved(self, done: OrderDone) -> None:
        """Take in that an order is done. If it has loaded blocks, requests that await them can be admitted."""
        if self.tier is None:
            return
        arrived: list[int] = []
        match done:
            case BlocksLoaded():
                arrived = self.tier.loaded(done)
            case BlocksRead():
                arrived = self.tier.read(done)
            case BlocksSaved():
                self.tier.saved(done)
            case BlocksStored():
                self.tier.stored(done)
        for request_id in arrived:
            self.arrived(request_id, BLOCKS)

    @property
    def last_step(self) -> int:
        """The number of the newest plan."""
        return self._next_step - 1

    @property
    def finished_step(self) -> int:
        """The number of the newest plan that is known to be computed, as all before it are; 0 if none is."""
        return self._steps_in_flight[0].number - 1 if self._steps_in_flight else self.last_step

    def abort(self, request_id: int) -> Request | None:
        """End a request now: no later plan has it, and its slot and blocks are free. None if it is already over."""
        return self.end(request_id, "abort")

    def expire(self) -> list[Request]:
        """End the requests whose deadline has passed, and return them. Very many are ended over several calls. Retained
        blocks go when their time is over."""
        ended, tokens, now = list[Request](), 0, self._clock.now()
        self.pool.release_expired(now)
        if self.states is not None:
            self.states.pool.release_expired(now)
        for request_id in () if self.tier is None else self.tier.overdue(now):
            if (late := self._request_table.get(request_id)) is not None:
                late.loads = MAX_LOADS
                self.arrived(request_id, BLOCKS)
        for request in self._deadlines.due(now):
            self.end(request.id, "timeout")
            ended.append(request)
            tokens += len(request.tokens)
            if tokens > ADMITTED_TOKENS:
                break
        return ended

    def end(self, request_id: int, reason: EndReason, message: str = "") -> Request | None:
        """End a request now for any reason; for `error` and `refused` with a message for the client. None if it is
        already over."""
        request = self._request_table.get(request_id)
        if request is not None:
            request.end(reason, message)
            self._release(request)
        return request

    # --- plan -------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when no request can move."""
        step = Step(self._next_step, self._lengths, masks=self._masked is not None, pools=self._pools, media=self.media)
        if self.states is not None:
            self.states.begin_step()
        if self.media is not None:
            self.media.begin_step()
        for request in self._rope_lengths.at_rope_switch(self._running):
            self._preempt(request)
        while (victim := self._admission.priority_victim(step)) is not None:
            self._preempt(victim, step)
        if self._running:
            self._move_running(step)
        else:
            self._budget.start_idle_step()
        if not step.out_of_blocks:
            self._admit_waiting(step)
        if self.tier is not None:
            step.swap_out += self.tier.end_step()
        is_empty = not step.requests and not step.swap_out
        if self.tier is not None:
            self.tier.order(step.number - is_empty, self._clock.now())
        if is_empty:
            return None
        self._next_step += 1
        if self.tier is not None:
            self.tier.planned(step.swap_out)
        plan, scheduled = step.finish(self._budget.predicted_ms)
        self._steps_in_flight.append(scheduled)
        return plan

    def _move_running(self, step: Step) -> None:
        lengths, index, requests = self._lengths, self._running.indices, list(self._running)
        planned, length = lengths.planned[index], lengths.known[index] + lengths.in_flight_tokens[index]
        uncomputed = np.where(length < lengths.limit[index], length - planned, 0)
        if self._host_bound is not None:
            uncomputed[(lengths.host_bound[index] > 0) & (lengths.in_flight_tokens[index] > 0)] = 0
        self._micro_batches.take_turns(uncomputed, index, lengths, step.number)
        counts = self._budget.start_step(planned, uncomputed, requests, self._waiting.num_uncomputed)
        for place in ((counts > 0) & (planned + counts > lengths.allocated[index])).nonzero()[0].tolist():
            request = requests[place]
            if request.slot is None or not self._reserve(request, int(counts[place]), step):
                break  # it was preempted, by an earlier request or for want of blocks, and so were all behind it
        if step.out_of_blocks:
            counts *= np.fromiter((r.slot is not None for r in requests), dtype=np.int64, count=len(requests))
        moving = counts.nonzero()[0]
        if len(moving) < len(requests):
            requests, index, counts = [requests[i] for i in moving.tolist()], index[moving], counts[moving]
        if requests:
            drafts = None
            if self._max_drafts is not None and step.number > self._undrafted:
                drafts = self._grant_drafts(requests, index, counts, step)
            self._move(requests, index, counts, step, drafts)

    def _grant_drafts(
        self, requests: Sequence[Request], index: IntArray, counts: IntArray, step: Step
    ) -> IntArray | None:
        """Draft tokens for the requests that decode, as far as tokens and blocks are left. None while a request waits
        for room: drafts would make it wait longer."""
        if self._waiting and self._request_table.num_free_slots:
            return None
        lengths, planned = self._lengths, self._lengths.planned[index]
        decoding = (counts == 1) & (planned + 1 == lengths.known[index] + lengths.in_flight_tokens[index])
        wanted = np.minimum(lengths.max_drafts[index], lengths.limit[index] - planned - 2)  # a sampled token follows
        drafts = self._budget.grant_drafts(counts, np.where(decoding, wanted, 0))
        most = counts + drafts
        for place in ((drafts > 0) & (planned + most > lengths.allocated[index])).nonzero()[0].tolist():
            if not self._allocate_blocks(requests[place], int(most[place]), step):
                drafts[place] = 0
        return drafts

    def _admit_waiting(self, step: Step) -> None:
        """Give slots to waiting requests, in queue order, while slots, tokens, time and blocks last."""
        waiting, admission = self._waiting, self._admission
        if not waiting or not self._request_table.num_free_slots:
            return
        reserved = admission.num_reserved_blocks()
        known, held, passing = 0, 0, False
        while (
            self._request_table.num_free_slots > held and self._budget.has_room(step.tokens) and known < ADMITTED_TOKENS
        ):
            request = waiting.first
            if request is None:
                break
            if not admission.is_ready(request, step):
                waiting.skip_first()
                held += admission.is_ready_next(request, step)
                continue
            if not admission.try_admit(request, reserved, step, passing=passing):
                if request.awaits:  # something that it needs is on its way: the others go on
                    continue
                if not waiting.pass_over_large():
                    break
                passing = True
                continue
            self._start(request, step)
            reserved += admission.num_blocks_to_allocate(request)
            known += _ADMISSION_TOKENS + len(request.tokens)
        waiting.restore_skipped()

    def _start(self, request: Request, step: Step) -> None:
        self._request_table.assign_slot(request)
        request.loads = 0
        if request.admitted_at is None:
            request.admitted_at = now = self._clock.now()
            self.stats.queue_delay.began(now, max(0.0, now - request.add.arrival))
            self.stats.prefix_queries += len(request.tokens)
            self.stats.prefix_hits += request.planned
        if self.states is not None:
            self.states.admit(request, step)
        step.admit(request)
        count = self._budget.grant(request, step.tokens)
        has_blocks = self._reserve(request, count, step)
        assert has_blocks and not step.out_of_blocks, "admission has counted its blocks"
        self._move([request], np.array([request.index]), np.array([count]), step)

    def _reserve(self, request: Request, count: int, step: Step) -> bool:
        """Allocate blocks for `count` tokens, preempting the last in queue order as long as there are too few. False
        when `request` itself was preempted."""
        while not self._allocate_blocks(request, count, step):
            victim = self._running[-1]
            self._preempt(victim, step)
            step.out_of_blocks = True
            if victim is request:
                return False
        return True

    def _allocate_blocks(self, request: Request, count: int, step: Step) -> bool:
        """Allocate blocks for `count` tokens; False when too few are free. Plans in flight may bring fewer tokens than
        planned, so blocks in the window of the least possible position are kept."""
        planned = request.planned
        if self._windowed:
            request.table.free_out_of_window(planned - request.in_flight_tokens)
        reservation = request.table.reserve(planned, planned + count)
        if reservation is None:
            return False
        self._lengths.allocated[request.index] = request.table.allocated_tokens
        step.reserve(request, reservation)
        return True

    def _move(
        self, requests: Sequence[Request], index: IntArray, counts: IntArray, step: Step, drafts: IntArray | None = None
    ) -> None:
        self._micro_batches.moved(index, self._lengths, step.number)
        for request in step.move(requests, index, counts, drafts):
            if not request.prompt_step and request.planned >= request.add.prompt_len:
                request.prompt_step = step.number
            self._prefix_cacher.add_pending(request)
        if self.states is not None:
            self.states.moved(requests, index, step, counts if drafts is None else counts + drafts)

    def cache_blocks(self) -> None:
        """Put blocks that planned steps fill into the prefix cache; called while the device runs."""
        self._prefix_cacher.cache_pending()

    def reset_prefix_cache(self) -> None:
        """Forget all that prompts could share."""
        self.pool.reset_prefix_cache()
        (self.tier or self.host).reset_prefix_cache()
        if self.states is not None:
            self.states.pool.reset_prefix_cache()

    def _preempt(self, victim: Request, step: Step | None = None) -> None:
        """Let a running request wait again. Without a step to swap it out in, all of it is computed again."""
        victim.preemptions += 1
        self.stats.preemptions += 1
        self._release(victim, step)

    # --- results ----------------------------------------------------------------------------------------------------

    def process_result(self, result: Result) -> StepOutputs:
        """Take in the oldest plan's result: append tokens, find stops, free the slots and blocks of what is over."""
        step, lengths = self._steps_in_flight.popleft(), self._lengths
        assert result.step == step.number, f"result of step {result.step}, expected {step.number}"
        if result.drafted:
            self.stats.speculation.count(result)
        if not any(result.drafted):  # predictions are those of steps without drafts
            self._budget.learn(step, result.device_ms)
        self._undrafted = max(self._undrafted, result.undrafted)
        self.host.grow(result.ready_host_blocks)
        if self.tier is not None:
            self.tier.computed()
        of_prompts = list(zip(step.prompt_logprobs_requests, result.prompt_logprobs, strict=True))
        prompt_logprobs = [(request.id, entries) for request, entries in of_prompts if request.ended is None]
        num_sampled, shrunk = update_lengths(step, lengths, result)
        new = append_tokens(step, result, num_sampled)
        cached_tokens = self._note_first_tokens(new)
        ended = check_stops(new, lengths, self._request_table)
        ended += fail_rows(step, result)
        if step.pooled_rows:
            ended += take_vectors(step, lengths, result)
        for request in ended:
            self._release(request)
        if len(shrunk):
            self._trim(step, shrunk)
        self._waiting.refresh_in_flight()
        ids = [request.id for request in new.requests]
        return StepOutputs(ids, new.counts, new.tokens, new.logprobs, ended, prompt_logprobs, cached_tokens)

    def _note_first_tokens(self, new: NewTokens) -> list[tuple[int, int]]:
        """Note when first tokens came; returns (id, cached prompt tokens) of their requests."""
        known = self._lengths.known[new.index] - (1 if new.one_each else new.counts)
        first = known == self._lengths.prompt[new.index]
        begun = [new.requests[place] for place in first.nonzero()[0].tolist()]
        for request in begun:
            request.first_token_at = self._clock.now()
        return [(request.id, request.num_cached_tokens) for request in begun if request.num_cached_tokens]

    def _trim(self, step: ScheduledStep, shrunk: IntArray) -> None:
        """Free blocks of requests that got fewer tokens than planned, except those that plans in flight may need."""
        lengths, size = self._lengths, self.pool.block_size
        spare = set(shrunk[lengths.allocated[shrunk] - lengths.planned[shrunk] > size].tolist())
        for request in step.requests if spare else ():
            if request.ended is None and request.slot is not None and request.index in spare:
                request.table.trim(request.planned + 1)  # room for its next token
                lengths.allocated[request.index] = min(lengths.allocated[request.index], request.table.allocated_tokens)

    def _release(self, request: Request, step: Step | None = None) -> None:
        """Give back all that a request holds, because it is over or preempted. Its output's blocks enter the prefix
        cache; those of a preempted request may be swapped out in `step`."""
        if request.slot is not None and request.ended != "error":
            self._prefix_cacher.cache_blocks(request)
        if step is not None and (self.states is None or self.states.can_keep()):
            self._preemption.swap_out(request, step)
        checkpoints = [] if self.states is None else self.states.release(request)
        retain_s = request.add.retain_s if request.ended not in (None, "error") else 0.0
        blocks = request.table.held_blocks(0, self.pool.most_retained) if retain_s else []
        for resource in self.resources:
            resource.release(request)
        if blocks:
            self.pool.retain(blocks, self._clock.now() + retain_s)
        if self.states is not None and retain_s:
            self.states.pool.retain(checkpoints, self._clock.now() + retain_s)
        if request.ended is not None:
            request.parent = None
            self._lengths.free(request.index)
