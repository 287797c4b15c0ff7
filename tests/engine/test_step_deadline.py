"""A step may take many times as long as the slowest of its size, and never less than a busy machine may need."""

from __future__ import annotations

from quire.engine.step_stats import FACTOR, SHORTEST_S, UNKNOWN_S, StepDeadline, StepStats
from quire.foundation.messages.workers import Result


def test_a_measured_size_is_judged_by_its_slowest_step() -> None:
    deadline = StepDeadline()
    deadline.learn(64, 0.01)
    assert deadline.limit_s(64) == SHORTEST_S
    deadline.learn(60, 2.0)
    deadline.learn(64, 0.01)
    assert 0.9 * FACTOR * 2.0 < deadline.limit_s(40) <= FACTOR * 2.0, "of the same bucket"
    for _ in range(500):
        deadline.learn(64, 0.01)
    assert deadline.limit_s(64) == SHORTEST_S, "it was long ago"


def test_an_unknown_size_gets_as_much_as_it_may_need() -> None:
    deadline = StepDeadline()
    assert deadline.limit_s(512) == UNKNOWN_S
    deadline.learn(16, 1.0)
    assert deadline.limit_s(512) == 3 * 512 / 16
    deadline.learn(256, 20.0)
    assert deadline.limit_s(512) == 3 * 20.0 * 2
    assert deadline.limit_s(1) == UNKNOWN_S


def test_the_oldest_step_in_flight_counts() -> None:
    stats = StepStats(100.0)
    stats.planned([8])
    stats.planned([512])
    stats.finished(Result(1, [1], [1]), 101.0)
    assert stats.limit_s == 3 * 512 / 8
    stats.finished(Result(2, [1], [1]), 104.0)
    stats.planned([8])
    assert stats.limit_s == FACTOR * 1.0
