"""The engine starts while prompts are still being submitted; that changes no output, no order and no cache hit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from quire.engine.inprocess import InProcessClient
from quire.errors import GenerationError, RequestError
from quire.foundation.messages.from_engine import Ready
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import Plan, Result
from quire.offline.run import OfflineRun
from quire.text.sequence_accumulator import SequenceAccumulator
from quire.text.text_stream import ChoiceState
from tests.engine.harness import add, alone, config
from tests.executor.fake import FakeExecutor

STEP = 64
PROMPTS = {number: [number % 5] * (10 + number % 7) for number in range(1, 41)}


class BusyExecutor(FakeExecutor):
    """A device whose steps are never over at once: who does not wait gets nothing."""

    def __init__(self, num_blocks: int = 200) -> None:
        super().__init__(num_blocks, block_size=8)
        self.plans: list[Plan] = []
        self.waits: list[float | None] = []

    def submit(self, plan: Plan) -> None:
        self.plans.append(plan)
        super().submit(plan)

    def collect(self, timeout: float | None) -> Result | None:
        self.waits.append(timeout)
        return None if timeout == 0.0 else super().collect(timeout)


class Stage:
    """An engine on such a device, and what a call would make of prompts."""

    def __init__(self, **settings: object) -> None:
        self.executor = BusyExecutor()
        self.engine = InProcessClient(
            config(max_num_batched_tokens=STEP, max_num_seqs=64, block_size=8, **settings), self.executor
        )
        ready = self.engine.receive(0)
        assert isinstance(ready, Ready)

    def generate(self, adds: Iterable[Add], head_start: int | None) -> list[list[int]]:
        sequences = []
        with OfflineRun(self.engine, head_start) as run:
            for each in adds:
                sequences.append(SequenceAccumulator(each, 0, ChoiceState(each, None)))
                run.submit(sequences[-1:])
            self.begun = len(self.executor.plans)
            self.waited_before = self.executor.waits[:]
            run.finish()
        return [sequence.whole.tokens for sequence in sequences]


@pytest.mark.parametrize("head_start", [None, STEP, 1])
def test_each_prompt_gets_what_it_gets_alone(head_start: int | None) -> None:
    stage = Stage()
    adds = [add(number, prompt, 5, arrival=float(number)) for number, prompt in PROMPTS.items()]
    assert stage.generate(adds, head_start) == [alone(prompt, 5) for prompt in PROMPTS.values()]
    counts = stage.engine.counts()
    assert counts["requests"] == 0
    assert counts["free_blocks"] == counts["blocks"]


def test_the_first_step_is_full_and_submitting_never_waits() -> None:
    stage = Stage()
    adds = [add(number, prompt, 5, arrival=float(number)) for number, prompt in PROMPTS.items()]
    stage.generate(adds, STEP)
    first = stage.executor.plans[0]
    assert stage.begun == 2, "two plans are in flight when the last prompt is submitted"
    assert sum(first.counts) == STEP
    assert set(stage.waited_before) == {0.0}


def test_without_a_head_start_all_are_queued_before_the_first_is_scheduled() -> None:
    stage = Stage(scheduling_policy="priority")
    adds = [add(number, [number] * 40, 1, priority=-number) for number in range(1, 9)]
    stage.generate(adds, None)
    assert stage.begun == 0
    assert stage.executor.plans[0].tokens[0] == 8, "the most urgent came last"


def test_equal_prompts_are_computed_once_all_the_same() -> None:
    hits = []
    for head_start in (None, STEP):
        stage = Stage()
        stage.generate([add(number, [7] * 41, 2, arrival=float(number)) for number in range(1, 21)], head_start)
        hits.append(sum(admitted.length for plan in stage.executor.plans for admitted in plan.admitted))
    assert hits == [19 * 40, 19 * 40]


def test_submitted_sequences_are_aborted_when_a_later_prompt_fails() -> None:
    def until_one_is_wrong() -> Iterator[Add]:
        yield from (add(number, prompt, 5) for number, prompt in PROMPTS.items())
        raise RequestError("The prompt is empty.")

    stage = Stage()
    with pytest.raises(RequestError):
        stage.generate(until_one_is_wrong(), STEP)
    assert stage.engine.counts()["running"] > 0
    assert stage.generate([add(99, [1, 2, 3], 4)], STEP) == [alone([1, 2, 3], 4)]
    assert stage.engine.counts()["requests"] == 0


def test_a_failed_sequence_is_raised_when_all_have_ended() -> None:
    stage = Stage()
    adds = [add(1, [1, 2, 3], 4), add(2, [], 4), add(3, [4, 5], 4)]
    with pytest.raises(GenerationError, match="prompt is empty"):
        stage.generate(adds, STEP)
    assert stage.engine.counts()["requests"] == 0
