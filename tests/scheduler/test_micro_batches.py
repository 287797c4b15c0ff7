"""Steps that are in a pipeline's stages together have different rows, and each row moves once in as many steps."""

from __future__ import annotations

import pytest

from quire.foundation.messages.workers import Plan
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.host_pool import HostPool
from quire.scheduling.scheduler.preemption import Preemption
from quire.scheduling.scheduler.scheduler import Scheduler
from quire.scheduling.scheduler.token_budget import TokenBudget
from tests.engine.harness import add
from tests.engine.test_client_liveness import ManualClock
from tests.executor.fake import FakeExecutor


class Pipeline:
    """A scheduler whose steps are in so many stages at a time, one more in front of them."""

    def __init__(self, stages: int) -> None:
        self.executor = FakeExecutor(64, 8, max_in_flight=stages + 1)
        self.scheduler = Scheduler(
            BlockPool(64, 8), 16, TokenBudget(32), Preemption(HostPool(), None), ManualClock(), stages=stages
        )
        self.plans: list[Plan] = []

    def step(self) -> None:
        """Plan as far ahead as there are stages, then take the oldest result."""
        while self.scheduler.steps_in_flight < self.executor.max_in_flight and (plan := self.scheduler.plan()):
            self.executor.submit(plan)
            self.plans.append(plan)
        result = self.executor.collect(None)
        assert result is not None
        self.scheduler.process_result(result)


@pytest.mark.parametrize(("stages", "rows"), [(2, 4), (2, 5), (3, 9), (3, 4)])
def test_rows_that_decode_take_turns(stages: int, rows: int) -> None:
    pipeline = Pipeline(stages)
    for number in range(rows):
        pipeline.scheduler.add(add(number, [7] * 4, max_tokens=60))
    for _ in range(40):
        pipeline.step()
    steady = [set(plan.slots) for plan in pipeline.plans[8:]]
    assert len(steady) > 20
    assert max(map(len, steady)) == -(-rows // stages), "each step has its share"
    for first in range(len(steady) - stages):
        together = steady[first : first + stages]
        assert sum(map(len, together)) == len(set.union(*together)) == rows, "and each row moves once a round"


def test_a_row_alone_moves_when_its_token_is_known() -> None:
    pipeline = Pipeline(2)
    pipeline.scheduler.add(add(0, [7] * 4, max_tokens=10))
    for _ in range(10):
        pipeline.step()
        assert pipeline.scheduler.steps_in_flight <= 1, "nothing waits in the stages for a token"
    assert not pipeline.scheduler.has_work


def test_chunks_of_a_prompt_follow_one_another() -> None:
    pipeline = Pipeline(2)
    pipeline.scheduler.add(add(0, [7] * 90, max_tokens=1))
    pipeline.step()
    assert [plan.counts for plan in pipeline.plans] == [[32], [32], [26]]
