"""What a long queue costs: nothing per step, and next to nothing per new request."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.engine.harness import add
from tests.scheduler.test_order import Stage


def calls_of(function: Callable[[], object]) -> int:
    """How many Python functions, generators and properties are entered."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def stage_with(waiting: int) -> Stage:
    """One request runs, and so many wait, some of them as forks."""
    stage = Stage(seqs=1, blocks=64)
    stage.scheduler.add(add(0, [1] * 20, 400))
    stage.step()
    for number in range(1, waiting + 1):
        stage.scheduler.add(add(number, [2] * 20, 5, arrival=1.0, fork_of=number - 1 if number % 3 == 0 else None))
    stage.step()
    assert len(stage.scheduler.waiting) == waiting
    return stage


def observe(stage: Stage) -> tuple[int, int, int]:
    """What each step tells the clients about the queue."""
    scheduler = stage.scheduler
    return len(scheduler.waiting), scheduler.waiting.num_tokens, scheduler.waiting.num_deferred


def test_a_step_and_its_load_cost_the_same_however_many_wait() -> None:
    def work(waiting: int) -> int:
        stage = stage_with(waiting)

        def step() -> None:
            stage.step()
            observe(stage)

        return calls_of(step)

    assert work(3_000) <= work(30) + 10


def test_load_counts_all_that_wait() -> None:
    assert observe(stage_with(300)) == (300, 300 * 20, 100)


def test_what_is_swapped_out_with_tokens_in_flight_still_has_one_to_be_computed() -> None:
    """It is planned beyond the tokens that are known."""
    stage = Stage(seqs=1, policy="priority", host=20, mode="swap")
    stage.scheduler.add(add(0, [1] * 20, 30))
    stage.step()
    for _ in range(2):
        assert stage.scheduler.plan()
    (victim,) = stage.scheduler.requests()
    stage.scheduler.add(add(1, [2] * 20, 3, arrival=1.0, priority=-1))
    assert stage.scheduler.plan()
    assert victim.swapped
    assert victim.planned > len(victim.tokens)
    assert stage.scheduler._waiting.num_uncomputed == 1
    assert stage.scheduler.waiting.queued_tokens == 1 + 29


def test_adding_to_a_long_queue_copies_nothing() -> None:
    stage = stage_with(5_000)
    peaks = []
    tracemalloc.start()
    for number in range(20):
        message = add(30_000 + number, [2] * 20, 5, arrival=0.5)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        stage.scheduler.add(message)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        stage.step()
    tracemalloc.stop()
    assert min(peaks) < 20_000
