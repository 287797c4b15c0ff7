"""Closed, open, and one request that tries."""

from __future__ import annotations

from quire.router.circuit_breaker import CircuitBreaker
from tests.engine.test_client_liveness import ManualClock


def opened(clock: ManualClock) -> CircuitBreaker:
    breaker = CircuitBreaker(3, 10.0, clock)
    for _ in range(3):
        assert breaker.passes
        breaker.sending()
        breaker.failed()
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = CircuitBreaker(3, 10.0, ManualClock())
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
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
    breaker.sending()
    breaker.failed()
    assert not breaker.passes
    clock.time += 10
    breaker.sending()
    breaker.succeeded()
    assert breaker.passes
    assert not breaker.is_open


def test_one_whose_client_goes_away_decides_nothing() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.time += 10
    breaker.sending()
    breaker.left()
    assert breaker.passes
    assert breaker.is_open
