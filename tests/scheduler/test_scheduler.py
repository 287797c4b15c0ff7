"""Random lives of requests against the invariants: nothing leaks, nothing is lost, every token is right.

The fake executor stores tokens in the blocks, so sharing, copying, swapping or freeing a block wrongly shows as a wrong
token.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.clock import SystemClock
from quire.executor.fake import FakeExecutor, hash_token
from quire.kvcache.groups import GroupReach, capacity
from quire.kvcache.host import HostPool
from quire.kvcache.pool import BlockPool
from quire.messages import Add
from quire.scheduler.budget import Budget
from quire.scheduler.preempt import Preemption
from quire.scheduler.scheduler import Scheduler
from tests.engine.harness import add

CHUNKS = st.integers(1, 20)
STEMS = [list(range(start, start + 50)) for start in (0, 100)]
"""Most prompts begin alike, so that prefixes are found."""


class Lives(RuleBasedStateMachine):
    """Adds, forks, aborts, resets, plans and settles in any order that the engine could produce."""

    def __init__(self) -> None:
        super().__init__()
        self.adds: dict[int, Add] = {}
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.aborted: set[int] = set()

    @initialize(
        num_blocks=st.integers(8, 40),
        block_size=st.sampled_from([1, 2, 8]),
        windows=st.sampled_from([(None,), (None,), (None, None), (None, 11), (9,)]),
        seqs=st.integers(1, 6),
        tokens=CHUNKS,
        max_in_flight=st.integers(1, 3),
        host_blocks=st.sampled_from([0, 7, 60]),
        mode=st.sampled_from(["recompute", "swap"]),
        policy=st.sampled_from(["fcfs", "priority"]),
        prefix_caching=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...],
        seqs: int,
        tokens: int,
        max_in_flight: int,
        host_blocks: int,
        mode: Any,
        policy: Any,
        prefix_caching: bool,
    ) -> None:
        groups = [GroupReach(window) for window in windows]
        self.reach = None if None in windows else max(filter(None, windows))
        self.pool = BlockPool(num_blocks, block_size)
        self.host = HostPool(host_blocks)
        self.capacity = capacity(groups, num_blocks, block_size, tokens, 100)
        self.executor = FakeExecutor(
            num_blocks,
            block_size,
            groups=groups,
            num_host_blocks=host_blocks,
            max_in_flight=max_in_flight,
        )
        self.scheduler = Scheduler(
            self.pool,
            seqs,
            Budget(tokens),
            Preemption(self.host, mode),
            SystemClock(),
            groups=groups,
            policy=policy,
            prefix_caching=prefix_caching,
        )
        self.budget, self.seqs = tokens, seqs

    def alone(self, message: Add) -> list[int]:
        """What a request would get with the engine to itself."""
        history = list(message.tokens)
        for drawn in range(message.sampling.max_tokens or 0):
            seen = history if self.reach is None else history[-self.reach :]
            history.append(hash_token(seen, drawn, 512))
            if history[-1] in message.stop_ids:
                break
        return history[message.prompt_len :]

    @rule(
        stem=st.sampled_from(STEMS),
        shared=st.integers(0, 50),
        own=st.lists(st.integers(0, 511), min_size=1, max_size=12),
        max_tokens=st.integers(1, 40),
        stop=st.booleans(),
        priority=st.integers(-2, 2),
        salt=st.sampled_from(["", "", "x"]),
        forks=st.integers(0, 2),
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
    ) -> None:
        prompt = [*stem[:shared], *own]
        max_tokens = min(max_tokens, self.capacity - len(prompt))
        if max_tokens < 1:
            return
        first = len(self.adds)
        message = add(first, prompt, max_tokens, priority=priority, cache_salt=salt)
        if stop:
            message = add(
                first, prompt, max_tokens, stop_ids=self.alone(message)[-1:], priority=priority, cache_salt=salt
            )
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
        self.pool.forget_all()

    @rule(times=st.integers(1, 4))
    def plan(self, times: int = 1) -> None:
        for _ in range(times):
            if self.scheduler.in_flight == self.executor.max_in_flight:
                return
            plan = self.scheduler.plan()
            if plan is not None:
                assert sum(plan.counts) <= self.budget
                assert len(plan.slots) <= self.seqs
                assert plan.slots or plan.swap_out
                self.executor.submit(plan)

    @rule()
    def settle(self) -> None:
        if not self.scheduler.in_flight:
            return
        result = self.executor.collect(None)
        assert result is not None
        settled = self.scheduler.settle(result)
        for number, token in zip(settled.ids, settled.tokens, strict=True):
            assert number not in self.ended, "a token after the end"
            self.got[number].append(token)
        for request in settled.ended:
            assert request.ended is not None
            self.ended[request.id] = request.ended

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        held: Counter[int] = Counter()
        swapped = 0
        for request in self.scheduler.requests():
            blocks = [block for row in request.table._rows for block in row]
            held.update(block for block in blocks if block > 0)
            swapped += sum(block < 0 for block in blocks)
            assert request.slot is not None or not any(block > 0 for block in blocks), "a waiting request holds blocks"
        assert {block: count for block, count in enumerate(self.pool._references) if count} == held
        assert len(held) + self.pool.num_free == self.pool.num_blocks
        assert swapped + self.host.num_free == self.host.num_blocks
        assert self.scheduler.running + self.scheduler.free_slots == self.seqs

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for _ in range(20_000):
            if not self.scheduler.has_work:
                break
            self.plan()
            self.settle()
        assert set(self.ended) == set(self.adds), "somebody starved"
        assert self.pool.num_free == self.pool.num_blocks
        assert self.host.num_free == self.host.num_blocks
        for number, message in self.adds.items():
            expected, got = self.alone(message), self.got[number]
            assert got == (expected[: len(got)] if number in self.aborted else expected)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
