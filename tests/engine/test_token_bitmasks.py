"""Late masks: made when the tokens before them are known, while others' steps go on."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.foundation.messages.to_engine import Abort
from quire.foundation.messages.workers import Plan, TokenBitmasks
from quire.scheduling.scheduler.request import Request
from tests.engine.harness import Engine, HashMasker, add, alone
from tests.executor.fake import FakeExecutor

MASKED = {"extra_args": {"masked": True}}


class Recorder(FakeExecutor):
    """Remembers the order in which plans and masks came, and results went."""

    def __init__(self, max_in_flight: int = 2) -> None:
        super().__init__(max_in_flight=max_in_flight)
        self.calls: list[tuple[str, int]] = []
        self.plans: list[Plan] = []

    def submit(self, plan: Plan) -> None:
        self.calls.append(("plan", plan.step))
        self.plans.append(plan)
        super().submit(plan)

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        self.calls.append(("masks", masks.step))
        super().submit_bitmasks(masks)

    def collect(self, timeout: float | None):  # type: ignore[no-untyped-def]
        result = super().collect(timeout)
        self.calls.append(("result", result.step))
        return result


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("blocks", [64, 9])
def test_masked_and_other_requests_each_get_what_they_get_alone(max_in_flight: int, blocks: int) -> None:
    rng = random.Random(3)
    masker = HashMasker()
    engine = Engine(FakeExecutor(blocks, 8, max_in_flight=max_in_flight), masker=masker, block_size=8)
    prompts = {i: [rng.randrange(512) for _ in range(rng.randint(1, 30))] for i in range(12)}
    adds = [add(i, p, 25, extra_args={"masked": i % 3 > 0, "drafts": 3}) for i, p in prompts.items()]
    outcome = engine.run(adds)
    assert outcome.tokens == {i: alone(p, 25, masked=i % 3 > 0) for i, p in prompts.items()}
    assert sorted(masker.forgotten) == sorted(prompts)
    assert (engine.client.counts()["preemptions"] > 0) == (blocks == 9)
    engine.assert_all_free()


@pytest.mark.parametrize("max_in_flight", [2, 3])
def test_masks_follow_their_plan_and_all_earlier_results_and_block_no_planning(max_in_flight: int) -> None:
    executor = Recorder(max_in_flight)
    engine = Engine(executor, masker=HashMasker())
    engine.run([add(1, [1, 2], 10, **MASKED), add(2, [3, 4], 10)])
    place = {call: index for index, call in enumerate(executor.calls)}
    for step in range(2, 10):
        assert place["plan", step] < place["masks", step] < place["result", step]
        assert place["result", step - 1] < place["masks", step]
        assert place["plan", step] < place["result", step - 1], "planned while the one before was in flight"
        assert place["plan", step] < place["masks", step - 1], "planned while the masks before were made"
    assert all(plan.masked == [0] for plan in executor.plans[:9])


def test_masks_that_are_there_at_once_are_sent_before_the_next_plan() -> None:
    executor, masker = Recorder(2), HashMasker()
    masker.ready = True
    engine = Engine(executor, masker=masker)
    outcome = engine.run([add(1, [1, 2], 10, **MASKED), add(2, [3, 4], 10)])
    place = {call: index for index, call in enumerate(executor.calls)}
    for step in range(2, 9):
        assert place["result", step - 1] < place["masks", step] < place["plan", step + 1]
    assert outcome.tokens == {1: alone([1, 2], 10, masked=True), 2: alone([3, 4], 10)}


def test_a_row_of_an_ended_request_gets_a_mask_too() -> None:
    engine = Engine(FakeExecutor(max_in_flight=3), masker=HashMasker())
    for number in (1, 2):
        engine.client.send(add(number, [number], 30, **MASKED))
    for _ in range(4):
        engine.step()
    engine.client.send(Abort([1]))
    outcome = engine.run([add(3, [7], 5)])
    engine.run([])
    while 2 not in outcome.ends:
        engine.step()
    assert outcome.tokens[2] == alone([2], 30, masked=True)
    assert outcome.tokens[3] == alone([7], 5)
    assert outcome.ends[1].reason == "abort"


def test_a_request_without_a_mask_fails_alone() -> None:
    engine = Engine(FakeExecutor(), masker=HashMasker(broken=[1]))
    outcome = engine.run([add(1, [1, 2], 10, **MASKED), add(2, [3, 4], 10, **MASKED), add(3, [5], 10)])
    assert (outcome.ends[1].reason, outcome.ends[1].message) == ("error", "broken")
    assert 1 not in outcome.tokens
    assert outcome.tokens[2] == alone([3, 4], 10, masked=True)
    assert outcome.tokens[3] == alone([5], 10)
    engine.finish_steps()
    engine.assert_all_free()


def test_a_request_that_is_aborted_while_its_mask_is_made_ends_once() -> None:
    """Whatever comes for it then: a mask, none, or an error."""

    class Completes(HashMasker):
        def bits_of(self, request: Request) -> Any:
            return None if len(request.tokens) > 5 else super().bits_of(request)

    maskers = [HashMasker(), Completes(), HashMasker(broken=[1]), Completes()]
    maskers[-1].ready = True
    for masker in maskers:
        engine = Engine(FakeExecutor(), masker=masker)
        engine.client.send(add(1, [1], 30, **MASKED))
        for steps in range(6):
            engine.client.send(add(10 + steps, [7], 3))
            engine.step()
        engine.client.send(Abort([1]))
        outcome = engine.run([add(2, [5], 5)])
        assert outcome.ends[1].reason in ("abort", "stop", "error")
        engine.finish_steps()
        engine.assert_all_free()


def test_the_fake_executor_requires_masks() -> None:
    executor = FakeExecutor()
    plan = Plan(step=1, masked=[0])
    executor.submit(plan)
    with pytest.raises(AssertionError, match="before its mask came"):
        executor.collect(None)
    executor.submit(plan)
    with pytest.raises(AssertionError, match="other rows"):
        executor.submit_bitmasks(TokenBitmasks(1, [1], [bytes(64)]))
    with pytest.raises(AssertionError, match="another vocabulary"):
        executor.submit_bitmasks(TokenBitmasks(1, [0], [bytes(4)]))
