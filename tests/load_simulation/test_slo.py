"""The highest rate within limits: on servers whose latency is known, and on a simulated one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.errors import ConfigError
from quire.simulation.engine import Occupancy, Served, SimulatedRun
from quire.simulation.slo import PRECISION, read_limits, search


Seconds = Callable[[float, int], float]
"""Of the rate, and the request's number."""


def a_server(ttft: Seconds, queued: Seconds = lambda rate, number: 0.0) -> Callable[[float], SimulatedRun]:
    """A run of 100 requests, whose times to the first token and in the queue are given."""

    def simulated(rate: float) -> SimulatedRun:
        served = [
            Served(number / rate, 10, [number / rate + ttft(rate, number)] * 2, queued=queued(rate, number))
            for number in range(100)
        ]
        return SimulatedRun(served, 1.0, 1, 1.0, [Occupancy(0.0, 1, 0, 0.0)])

    return simulated


@pytest.mark.parametrize("limit", [0.3, 7.0, 50.0, 900.0])
def test_the_rate_is_where_the_limit_is_reached(limit: float) -> None:
    found = search(a_server(lambda rate, number: rate / 1e3), {"ttft": limit}, 1.0)
    assert found.best is not None and found.over is not None
    assert limit / PRECISION <= found.best.rate <= limit <= found.over.rate
    assert found.over.rate / found.best.rate <= PRECISION
    assert "TTFT above" in found.reason()


def test_as_many_requests_may_be_slow_as_the_attainment_allows() -> None:
    server = a_server(lambda rate, number: rate / 1e3 if number % 10 else 9.0)  # a tenth is always slow
    assert search(server, {"ttft": 50.0}, 0.9).best is not None
    none = search(server, {"ttft": 50.0}, 0.91)
    assert none.best is None
    assert "10.00% of the requests" in none.reason()


def test_a_growing_queue_is_not_sustained_whatever_the_limits_say() -> None:
    server = a_server(lambda rate, number: 1.0, lambda rate, number: rate / 35 * number / 100)
    found = search(server, {"tpot": 50.0}, 0.99)
    assert found.best is not None
    assert found.best.rate == pytest.approx(20, rel=0.03)  # of a second, the last quarter is queued for half
    assert "the queue grows" in found.reason()
    steady = search(a_server(lambda rate, number: 1.0, lambda rate, number: rate / 35), {"tpot": 50.0}, 0.99)
    assert steady.over is None, "a queue that is long from the beginning does not grow"


def test_a_load_that_breaks_nothing_is_said_to_be_too_short() -> None:
    found = search(a_server(lambda rate, number: 0.001), {"ttft": 50.0}, 0.99)
    assert found.over is None
    assert "too short" in found.reason()


def test_limits_are_read() -> None:
    assert read_limits("ttft=500, tpot=40") == {"ttft": 500.0, "tpot": 40.0}
    for text in ("", "ttft", "ttft=0", "ttft=-1", "ttft=nan", "ttft=inf", "tftt=3", "ttft:500", "ttft=500,"):
        with pytest.raises(ConfigError, match="--slo takes"):
            read_limits(text)
