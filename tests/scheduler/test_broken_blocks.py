"""Blocks of a row that failed are found by nobody, whatever has happened to its request since the step was planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.foundation.clock import SystemClock
from quire.foundation.config.scheduler import PreemptionMode
from quire.foundation.messages.workers import Result
from quire.scheduling.kvcache.block_hashes import BlockHashes
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.host_pool import HostPool
from quire.scheduling.scheduler.preemption import Preemption
from quire.scheduling.scheduler.scheduler import Scheduler
from quire.scheduling.scheduler.token_budget import TokenBudget
from tests.engine.harness import add
from tests.executor.fake import FakeExecutor
from tests.simulation.executor import with_broken_row

PROMPT = list(range(44))
BLOCK = 8


class Stage:
    """A scheduler with room for one prompt at a time, whose first step's only row fails."""

    def __init__(self, mode: PreemptionMode) -> None:
        self.pool = BlockPool(8, BLOCK)
        host = HostPool()
        host.grow(8)
        self.executor = FakeExecutor(8, BLOCK, num_host_blocks=8)
        self.scheduler = Scheduler(
            self.pool, 4, TokenBudget(64), Preemption(host, mode), SystemClock(), policy="priority"
        )
        self.scheduler.add(add(1, PROMPT, 20))
        self.plan()

    def plan(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        self.executor.submit(plan)
        self.scheduler.cache_blocks()

    def result(self) -> Result:
        result = self.executor.collect(None)
        assert result is not None
        return result

    def num_cached(self) -> int:
        """Blocks of the prompt in the prefix cache."""
        hashes = BlockHashes(BLOCK).hash_up_to(PROMPT, len(PROMPT))
        return sum(self.pool.get_cached_block((0, block_hash)) is not None for block_hash in hashes)


def nothing(stage: Stage) -> None:
    """The request runs on."""


def abort(stage: Stage) -> None:
    """Its client leaves."""
    assert stage.scheduler.abort(1) is not None


def preempt(stage: Stage) -> None:
    """A more urgent request takes its blocks."""
    stage.scheduler.add(add(2, [100] * 20, 1, priority=-1))
    stage.plan()
    (request,) = stage.scheduler.waiting
    assert request.id == 1


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("meanwhile", [nothing, abort, preempt])
def test_nobody_finds_broken_blocks(meanwhile: Callable[[Stage], None], mode: PreemptionMode) -> None:
    stage = Stage(mode)
    meanwhile(stage)
    assert stage.num_cached() > 0, "they are found before it is known that they are broken"
    outputs = stage.scheduler.process_result(with_broken_row(stage.result(), 0))
    assert [request.ended for request in outputs.ended] == ([] if meanwhile is abort else ["error"])
    assert stage.num_cached() == 0
    while stage.scheduler.has_work:
        if stage.scheduler.steps_in_flight == 0:
            stage.plan()
        stage.scheduler.process_result(stage.result())
    assert stage.pool.num_free == 8
    assert stage.scheduler.host.num_free == 8


@pytest.mark.parametrize(("stop_ids", "ended"), [([], "refused"), ([8], "stop")])
def test_a_row_that_fails_keeps_the_drafts_accepted_before(stop_ids: list[int], ended: str) -> None:
    """Steps without drafts would have brought these tokens first, and would not fail behind one that stops."""
    pool = BlockPool(8, BLOCK)
    scheduler = Scheduler(
        pool, 4, TokenBudget(64), Preemption(HostPool()), SystemClock(), max_drafts=lambda add: 4
    )  # fmt: skip
    scheduler.add(add(1, [1, 2], 20, stop_ids=stop_ids))
    assert scheduler.plan() is not None
    scheduler.process_result(Result(1, [1], [6]))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.drafts == [4]
    result = Result(plan.step, [2], [7, 8], errors=[(0, "No token is left.")], drafted=[4], refused=[0])
    outputs = scheduler.process_result(result)
    assert (outputs.ids, outputs.counts, outputs.tokens) == ([1], [2], [7, 8])
    assert [(request.ended, request.tokens) for request in outputs.ended] == [(ended, [1, 2, 6, 7, 8])]
    assert pool.num_free == 8
