"""Closed, open, and one request that tries."""

from __future__ import annotations

from quire.serving.router.backend import CircuitBreaker
from tests.engine.test_client_liveness import ManualClock


def opened(clock: ManualClock) -> CircuitBreaker:
    breaker = CircuitBreaker(3, 10.0, clock)
    for _ in range(3):
        assert breaker.passes
        breaker.failed(breaker.sending())
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = CircuitBreaker(3, 10.0, ManualClock())
    for _ in range(5):
        breaker.failed(breaker.sending())
        breaker.failed(breaker.sending())
        breaker.succeeded(breaker.sending())
    assert breaker.passes
    assert not breaker.is_open


def test_open_it_lets_nothing_pass_until_its_time_is_over_and_then_one() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.time += 9.9
    assert not breaker.passes
    clock.time += 0.1
    assert breaker.passes
    breaker.sending()
    assert not breaker.passes, "one is on its way"
    assert breaker.is_open


def test_the_one_that_tries_decides() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.time += 10
    breaker.failed(breaker.sending())
    assert not breaker.passes
    clock.time += 10
    breaker.succeeded(breaker.sending())
    assert breaker.passes
    assert not breaker.is_open


def test_one_whose_client_goes_away_decides_nothing() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.time += 10
    breaker.left(breaker.sending())
    assert breaker.passes
    assert breaker.is_open


def test_the_end_of_an_older_request_lets_no_second_one_try() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(3, 10.0, clock)
    older = [breaker.sending() for _ in range(6)]
    for number in older[:3]:
        breaker.failed(number)
    clock.time += 10
    trial = breaker.sending()
    breaker.left(older[3])
    breaker.failed(older[4])
    breaker.succeeded(older[5])
    assert breaker.is_open
    assert not breaker.passes, "one is still on its way"
    breaker.succeeded(trial)
    assert not breaker.is_open
    assert breaker.passes


def test_the_late_end_of_one_that_tried_does_not_end_the_next_one() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.time += 10
    first = breaker.sending()
    breaker.succeeded(first)
    for _ in range(2):
        breaker.failed(breaker.sending())
    breaker.failed(first)  # its answer breaks off, which opens the breaker again
    assert breaker.is_open
    clock.time += 10
    breaker.sending()
    breaker.failed(first)
    breaker.left(first)
    assert not breaker.passes
