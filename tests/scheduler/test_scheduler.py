"""Random lives of requests against the invariants: nothing leaks, nothing is lost, every token is right.

The fake executor stores tokens in the blocks, so sharing, copying, swapping or freeing a block wrongly shows as a wrong
token. It brings fewer tokens than a plan allows for, and waits for masks that depend on every token before them, so a
mask made from stale tokens shows as well.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.engine.token_bitmasks import TokenBitmaskSender
from quire.foundation.clock import SystemClock
from quire.foundation.messages.to_engine import Add
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.cache_groups import FULL, CacheGroup, Chunk, Reach, Window, capacity
from quire.scheduling.kvcache.host_pool import HostPool
from quire.scheduling.kvcache.host_tier import HostTier
from quire.scheduling.scheduler import tenant_queue
from quire.scheduling.scheduler.admission import Admission
from quire.scheduling.scheduler.preemption import Preemption
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.scheduler import Scheduler
from quire.scheduling.scheduler.sequence_states import CheckpointRule
from quire.scheduling.scheduler.tenant_queue import SMALL
from quire.scheduling.scheduler.token_budget import TokenBudget
from tests.engine.harness import HashMasker, add, drafts_of
from tests.executor.fake import FakeExecutor, allowed, hash_token, state_of, stateful_counter
from tests.scheduler.test_order import LinearCost

CHUNKS = st.sampled_from([40, 20, 13, 7, 2, 1])
REACHES: list[tuple[Reach, ...]] = [
    (FULL,), (FULL,), (FULL, FULL), (FULL, Window(11)), (Window(9),), (FULL, Chunk(12)), (Chunk(10), Window(5)),
]  # fmt: skip
STEMS = [list(range(start, start + 50)) for start in (0, 100)]
"""Most prompts begin alike, so that prefixes are found."""


class Lives(RuleBasedStateMachine):
    """Adds, forks, aborts, resets, plans and processes results in any order that the engine could produce."""

    def __init__(self) -> None:
        super().__init__()
        self.adds: dict[int, Add] = {}
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.aborted: set[int] = set()

    @initialize(
        num_blocks=st.sampled_from([13, 20, 30, 40, 8]),
        block_size=st.sampled_from([1, 2, 8]),
        reaches=st.sampled_from(REACHES),
        seqs=st.sampled_from([3, 6, 4, 2, 1]),
        tokens=CHUNKS,
        max_in_flight=st.sampled_from([3, 2, 1]),
        stages=st.sampled_from([1, 2, 3]),
        host_blocks=st.sampled_from([0, 7, 60]),
        mode=st.sampled_from(["recompute", "swap"]),
        policy=st.sampled_from(["fcfs", "priority"]),
        prefix_caching=st.booleans(),
        timed=st.booleans(),
        states=st.sampled_from([None, (0, 1), (2, 1), (5, 2), (40, 1), (12, 4)]),
        has_attention=st.sampled_from([True, True, False]),
        tiered=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        reaches: tuple[Reach, ...],
        seqs: int,
        tokens: int,
        max_in_flight: int,
        stages: int,
        host_blocks: int,
        mode: Any,
        policy: Any,
        prefix_caching: bool,
        timed: bool,
        states: tuple[int, int] | None,
        has_attention: bool,
        tiered: bool,
        seed: int,
    ) -> None:
        """With `states`, there are so many beside those of slots, and so many blocks between checkpoints."""
        if states is not None and not has_attention:
            reaches = ()
        groups, luck = [CacheGroup(reach=reach) for reach in reaches], random.Random(seed)
        tenant_queue.SMALL = luck.choice([12, SMALL])  # prompts are short here, and some are to be large
        self.reaches = reaches
        self.pool = BlockPool(num_blocks, block_size)
        self.host = HostPool()
        ready = [*sorted(luck.choices(range(host_blocks + 1), k=30)), host_blocks]
        self.capacity = capacity(groups, num_blocks, block_size, tokens, 100)
        self.executor = FakeExecutor(
            num_blocks,
            block_size,
            groups=groups,
            num_host_blocks=host_blocks,
            ready_host_blocks=lambda: ready.pop(0) if len(ready) > 1 else ready[0],
            max_in_flight=max_in_flight,
            accept=lambda most: luck.randint(bool(states) or (most == 1 and luck.random() < 0.8), most),
            num_states=seqs + states[0] if states else 0,
        )
        self.states = None
        if states is not None:
            self.states = BlockPool(seqs + states[0], block_size), CheckpointRule(states[1] * block_size)
        self.masker = HashMasker()
        self.scheduler = Scheduler(
            self.pool,
            seqs,
            TokenBudget(tokens, cost=LinearCost(streams_ms=12.0) if timed else None),
            Preemption(self.host, mode, tier=HostTier(self.pool, self.host) if tiered else None),
            SystemClock(),
            groups=groups,
            policy=policy,
            prefix_caching=prefix_caching,
            max_drafts=drafts_of,
            masked=self.masker.wants,
            stages=stages,
            states=self.states,
        )
        self.look_again_at_what_does_not_fit(self.scheduler._admission)
        self.masks = TokenBitmaskSender(self.masker, self.scheduler, self.executor, 512)
        self.budget, self.seqs = tokens, seqs

    def look_again_at_what_does_not_fit(self, admission: Admission) -> None:
        """A request that is turned away without a lookup would be turned away with one.

        With chunks, a shorter prefix may be held by others, so it would not be.
        """
        if any(isinstance(reach, Chunk) for reach in self.reaches):
            return
        remembered = admission._would_fail_again

        def would_fail_again(request: Request, reserved: int) -> bool:
            fails = remembered(request, reserved)
            if fails:
                failed, watched = admission._last_failed, self.pool._watched
                watched_states = self.states[0]._watched if self.states else set()
                parent = request.parent
                if parent is not None and admission._can_share_prompt(parent, request.add.prompt_len):
                    assert not admission._try_fork(request, parent, reserved)
                else:
                    assert not admission._try_share_prefix(request, reserved)
                admission._last_failed = failed
                self.pool.watch(watched)
                if self.states is not None:
                    self.states[0].watch(watched_states)
            return fails

        admission._would_fail_again = would_fail_again  # type: ignore[method-assign]

    def alone(self, message: Add) -> list[int]:
        """What a request would get with the engine to itself."""
        history = list(message.tokens)
        for drawn in range(message.sampling.max_tokens or 0):
            first = [reach.first_visible(len(history) - 1) for reach in self.reaches]
            counter = stateful_counter(drawn, state_of(history)) if self.states else drawn
            token = hash_token(history[min(first) :] if first else [], counter, 512)
            history.append(allowed(token, self.masker.mask(history), 512) if self.masker.wants(message) else token)
            if history[-1] in message.stop_ids:
                break
        return history[message.prompt_len :]

    @rule(
        stem=st.sampled_from(STEMS),
        shared=st.integers(0, 50),
        own=st.lists(st.integers(0, 511), min_size=1, max_size=12),
        max_tokens=st.sampled_from([40, 25, 11, 5, 3, 1]),
        stop=st.booleans(),
        priority=st.integers(-2, 2),
        salt=st.sampled_from(["", "", "x"]),
        forks=st.integers(0, 2),
        drafts=st.sampled_from([3, 7, 2, 1, 0]),
        masked=st.sampled_from([False, False, False, True]),
    )
    def arrive(
        self,
        stem: list[int],
        shared: int,
        own: list[int],
        max_tokens: int,
        stop: bool,
        priority: int,
        salt: str,
        forks: int,
        drafts: int,
        masked: bool,
    ) -> None:
        prompt = [*stem[:shared], *own]
        max_tokens = min(max_tokens, self.capacity - len(prompt))
        if max_tokens < 1:
            return
        first = len(self.adds)
        fields: dict[str, Any] = {
            "priority": priority, "cache_salt": salt, "tenant": str(max_tokens % 3),
            "extra_args": {"drafts": drafts, "masked": masked},
        }  # fmt: skip
        message = add(first, prompt, max_tokens, **fields)
        if stop:
            message = add(first, prompt, max_tokens, stop_ids=self.alone(message)[-1:], **fields)
        for fork in range(forks + 1):
            number = first + fork
            fields = {f: getattr(message, f) for f in message.__struct_fields__}
            self.adds[number] = Add(**fields | {"id": number, "fork_of": first if fork else None})
            self.got[number] = []
            self.scheduler.add(self.adds[number])

    @rule(which=st.integers(0, 10_000))
    @precondition(lambda self: self.adds)
    def abort(self, which: int) -> None:
        number = which % len(self.adds)
        request = self.scheduler.abort(number)
        assert (request is None) == (number in self.ended)
        if request is not None:
            self.ended[number] = "abort"
            self.aborted.add(number)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    @rule(times=st.integers(1, 4))
    def plan(self, times: int = 1) -> None:
        for _ in range(times):
            if self.scheduler.steps_in_flight == self.executor.max_in_flight:
                return
            self.take_orders()
            plan = self.scheduler.plan()
            if plan is not None:
                assert sum(plan.counts) <= self.budget
                assert len(plan.slots) <= self.seqs
                assert plan.slots or plan.swap_out
                self.executor.submit(plan)
            for order in self.scheduler.take_orders():
                self.executor.orders.post(order)

    def take_orders(self) -> None:
        for done in self.executor.orders.done():
            self.scheduler.moved(done)

    @rule()
    def send_masks(self) -> None:
        assert not self.masks.send()

    @rule()
    def process_result(self) -> None:
        if not self.scheduler.steps_in_flight:
            return
        assert not self.masks.send()
        result = self.executor.collect(None)
        assert result is not None
        outputs = self.scheduler.process_result(result)
        tokens = iter(outputs.tokens)
        for number, count in zip(outputs.ids, outputs.counts, strict=True):
            assert number not in self.ended, "a token after the end"
            assert count > 0
            self.got[number] += islice(tokens, count)
        assert not list(tokens)
        for request in outputs.ended:
            assert request.ended is not None
            self.ended[request.id] = request.ended

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        held: Counter[int] = Counter()
        swapped: Counter[int] = Counter()
        for request in self.scheduler.requests():
            blocks = [block for row in request.table._blocks for block in row]
            held.update(block for block in blocks if block > 0)
            swapped.update(~block for block in blocks if block < 0)
            assert request.slot is not None or not any(block > 0 for block in blocks), "a waiting request holds blocks"
        if self.scheduler.tier is not None:
            moving, read = self.scheduler.tier.held
            held.update(moving)
            swapped.update(read)
        assert {block: count for block, count in enumerate(self.pool._ref_counts) if count} == held
        assert len(held) + self.pool.num_free == self.pool.num_blocks
        assert swapped == self.host._holders
        assert len(swapped) + self.host.num_free == self.host.num_blocks
        assert len(self.scheduler.running) + self.scheduler.num_free_slots == self.seqs

    @invariant()
    def states_are_conserved(self) -> None:
        if not hasattr(self, "scheduler") or self.scheduler.states is None:
            return
        states, held = self.scheduler.states, Counter[int]()
        for request in self.scheduler.requests():
            own = request.states
            assert own is not None
            assert bool(own.current) == (request.slot is not None or request.swapped), request
            held.update(
                state for state in (own.current, own.fork, *(s for _, s in own.checkpoints + own.marks)) if state
            )
        assert {state: count for state, count in enumerate(states.pool._ref_counts) if count} == held
        assert len(held) + states.pool.num_free == states.pool.num_blocks
        assert states._kept == len(held) - len(self.scheduler.running)
        assert states.pool.num_free >= self.scheduler.num_free_slots, "a slot may find no state"

    @invariant()
    def what_waits_is_counted(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        waiting = [request for request in self.scheduler.requests() if request.slot is None]
        assert len(self.scheduler.waiting) == len(waiting)
        assert self.scheduler.waiting.num_tokens == sum(len(request.tokens) for request in waiting)
        awaiting = [each for each in waiting if each.in_flight_tokens or each.parent is not None or each.awaits]
        assert self.scheduler.waiting.num_deferred == len(awaiting)
        computed = (request.planned if r is None else max(request.planned, request.add.prompt_len - 1)
                    for request in waiting for r in [request.parent])  # fmt: skip
        in_flight = sum(request.in_flight_tokens for request in waiting)
        assert self.scheduler._waiting.num_uncomputed == self.scheduler.waiting.num_tokens + in_flight - sum(computed)

    @invariant()
    def lengths_are_in_order(self) -> None:
        for request in self.scheduler.requests() if hasattr(self, "scheduler") else ():
            assert 0 <= request.computed <= request.planned <= len(request.tokens) + request.in_flight_tokens, request
            assert len(request.tokens) + request.in_flight_tokens <= request.limit, "more than it may have is planned"
            assert self.scheduler.steps_in_flight or request.planned == request.computed, request
            if request.slot is not None:
                if not self.reaches:
                    continue
                blocks, planned = len(request.table._blocks[0]), request.planned
                assert blocks >= self.pool.blocks_for(planned), "planned beyond its blocks"
                unused = blocks > self.pool.blocks_for(planned + 1)
                assert not unused or request.preemptions or self.scheduler.steps_in_flight, (
                    "blocks that nothing will fill"
                )

    def teardown(self) -> None:
        tenant_queue.SMALL = SMALL
        if not hasattr(self, "pool"):
            return
        for _ in range(20_000):
            if not self.scheduler.has_work and not self.scheduler.moves_blocks:
                break
            self.plan()
            self.lengths_are_in_order()
            self.process_result()
            self.lengths_are_in_order()
            self.blocks_are_conserved()
            self.states_are_conserved()
        assert set(self.ended) == set(self.adds), "somebody starved"
        assert self.pool.num_free == self.pool.num_blocks
        assert self.host.num_free == self.host.num_blocks
        for number, message in self.adds.items():
            expected, got = self.alone(message), self.got[number]
            assert got == (expected[: len(got)] if number in self.aborted else expected)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=50)


@pytest.mark.long("engine")
class TestManyLives(Lives.TestCase):
    settings = settings(max_examples=300, stateful_step_count=50)
