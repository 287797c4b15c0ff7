"""Requests end when their time is over: those that wait without a step of their own, others with what they have."""

from __future__ import annotations

import random

import pytest

from tests.engine.harness import add
from tests.scheduler.test_order import Stage


def expire(stage: Stage, now: float) -> list[int]:
    stage.clock.time = now
    return [request.id for request in stage.scheduler.expire()]


def test_a_waiting_request_that_is_too_late_is_in_no_plan() -> None:
    stage = Stage(seqs=1)
    stage.scheduler.add(add(0, [1] * 20, 30))
    stage.scheduler.add(add(1, [2] * 20, 30, arrival=1.0, deadline=5.0))
    stage.step()
    assert expire(stage, 4.9) == []
    assert expire(stage, 5.0) == [1]
    for _ in stage.steps(until=0):
        pass
    assert not any(1 in counts for counts in stage.counts)
    assert expire(stage, 100.0) == []


def test_a_running_request_keeps_what_it_has_and_frees_what_it_holds() -> None:
    stage = Stage()
    free = stage.scheduler.pool.num_free
    stage.scheduler.add(add(0, [1] * 20, 30, deadline=5.0))
    for _ in range(4):
        stage.step()
    (request,) = stage.scheduler.requests()
    assert expire(stage, 6.0) == [0]
    assert (request.ended, request.output_len) == ("timeout", 4)
    assert stage.scheduler.pool.num_free == free
    assert not stage.scheduler.has_work


def test_a_plan_in_flight_is_dropped_for_it() -> None:
    stage = Stage()
    stage.scheduler.add(add(0, [1] * 20, 30, deadline=5.0))
    plan = stage.scheduler.plan()
    assert plan is not None
    stage.executor.submit(plan)
    assert expire(stage, 6.0) == [0]
    result = stage.executor.collect(None)
    assert result is not None
    assert stage.scheduler.process_result(result).tokens == []


def test_very_many_that_are_due_end_over_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.scheduling.scheduler.scheduler.ADMITTED_TOKENS", 30)
    stage = Stage()
    for number in range(8):
        stage.scheduler.add(add(number, [1] * 10, 9, deadline=5.0))
    assert [expire(stage, 6.0) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], []]
    assert not stage.scheduler.has_work


def test_all_that_are_due_end_once_in_the_order_of_their_deadlines() -> None:
    stage = Stage(seqs=2)
    deadlines = {number: random.Random(number).uniform(1, 10) for number in range(40)}
    for number, deadline in deadlines.items():
        stage.scheduler.add(add(number, [1] * 4, 9, deadline=deadline))
    stage.step()
    aborted = stage.scheduler.abort(7)
    assert aborted is not None
    in_order = sorted(deadlines.keys() - {7}, key=lambda number: deadlines[number])
    assert expire(stage, 5.0) + expire(stage, 10.0) == in_order


def test_ended_requests_are_forgotten_long_before_their_deadline() -> None:
    stage = Stage()
    for number in range(500):
        stage.scheduler.add(add(number, [1] * 4, 1, deadline=1e9))
        stage.step()
    assert len(stage.scheduler._deadlines._heap) < 200
