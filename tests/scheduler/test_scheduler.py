"""Random lives of requests against the invariants: nothing leaks, nothing is lost, every token is right.

The fake executor stores tokens in the blocks, so sharing or freeing a block wrongly shows as a wrong token.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.clock import SystemClock
from quire.executor.fake import FakeExecutor
from quire.kvcache.pool import BlockPool
from quire.messages import Add
from quire.scheduler.scheduler import Scheduler
from tests.engine.harness import add, alone


class Lives(RuleBasedStateMachine):
    """Adds, aborts, plans and settles in any order that the engine could produce."""

    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.sampled_from([1, 2, 8]),
        groups=st.integers(1, 2),
        seqs=st.integers(1, 6),
        tokens=st.integers(1, 20),
        max_in_flight=st.integers(1, 3),
    )
    def start(self, num_blocks: int, block_size: int, groups: int, seqs: int, tokens: int, max_in_flight: int) -> None:
        self.pool = BlockPool(num_blocks * groups, block_size)
        self.capacity = num_blocks * block_size
        self.executor = FakeExecutor(num_blocks * groups, block_size, num_groups=groups, max_in_flight=max_in_flight)
        self.scheduler = Scheduler(self.pool, groups, seqs, tokens, SystemClock())
        self.budget, self.seqs = tokens, seqs
        self.adds: dict[int, Add] = {}
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.aborted: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(0, 511), min_size=1, max_size=60),
        max_tokens=st.integers(1, 40),
        stop=st.booleans(),
    )
    def arrive(self, prompt: list[int], max_tokens: int, stop: bool) -> None:
        max_tokens = min(max_tokens, self.capacity - len(prompt))
        if max_tokens < 1:
            return
        number = len(self.adds)
        stop_ids = alone(prompt, max_tokens)[max_tokens // 2 :][:1] if stop else []
        self.adds[number] = add(number, prompt, max_tokens, stop_ids=stop_ids)
        self.got[number] = []
        self.scheduler.add(self.adds[number])

    @rule(which=st.integers(0, 10_000))
    def abort(self, which: int) -> None:
        if not self.adds:
            return
        number = which % len(self.adds)
        request = self.scheduler.abort(number)
        assert (request is None) == (number in self.ended)
        if request is not None:
            self.ended[number] = "abort"
            self.aborted.add(number)

    @rule()
    def plan(self) -> None:
        if self.scheduler.in_flight == self.executor.max_in_flight:
            return
        plan = self.scheduler.plan()
        if plan is not None:
            assert 0 < sum(plan.counts) <= self.budget
            assert len(plan.slots) <= self.seqs
            self.executor.submit(plan)

    @rule()
    def settle(self) -> None:
        if not self.scheduler.in_flight:
            return
        result = self.executor.collect(None)
        assert result is not None
        for gain in self.scheduler.settle(result):
            number = gain.request.id
            assert number not in self.ended, "a token after the end"
            assert gain.token is not None
            self.got[number].append(gain.token)
            if gain.request.ended is not None:
                self.ended[number] = gain.request.ended

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = sum(request.table.num_blocks for request in self.scheduler._requests.values())
        assert held + self.pool.num_free == self.pool.num_blocks
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
        for number, message in self.adds.items():
            expected = alone(message.tokens, message.sampling.max_tokens or 0, message.stop_ids)
            got = self.got[number]
            assert got == (expected[: len(got)] if number in self.aborted else expected)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
