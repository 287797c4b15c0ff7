"""The highest rate within limits: on servers whose latency is known, and on a simulated one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.errors import ConfigError
from quire.tools.simulation.engine import Occupancy, Served, SimulatedRun
from quire.tools.simulation.slo import PRECISION, read_limits, search

Seconds = Callable[[float, int], float]
"""Of the rate, and the request's number."""


def a_server(ttft: Seconds) -> Callable[[float], SimulatedRun]:
    """Runs of 100 requests whose two tokens come at a given time."""

    def simulated(rate: float) -> SimulatedRun:
        served = [Served(number / rate, 10, [number / rate + ttft(rate, number)] * 2) for number in range(100)]
        return SimulatedRun(served, 1.0, 1, 1.0, [Occupancy(0.0, 1, 0, 0.0)])

    return simulated


@pytest.mark.parametrize("rate", [0.3, 7.0, 50.0, 200.0])
@pytest.mark.parametrize("first", [1.0, 60.0])
def test_the_rate_is_where_the_limit_is_reached(rate: float, first: float) -> None:
    found = search(a_server(lambda rate, number: rate / 1e6), first, {"ttft": rate / 1e3}, 1.0)
    assert found.best is not None
    assert found.over is not None
    assert rate / PRECISION <= found.best.rate <= rate <= found.over.rate
    assert found.over.rate / found.best.rate <= PRECISION
    assert "TTFT above" in found.reason()


def test_as_many_requests_may_be_slow_as_the_attainment_allows() -> None:
    server = a_server(lambda rate, number: rate / 1e6 if number % 10 else 0.09)  # a tenth is always slow
    assert search(server, 1.0, {"ttft": 0.05}, 0.9).best is not None
    none = search(server, 1.0, {"ttft": 0.05}, 0.91)
    assert none.best is None
    assert "10.00% of the requests" in none.reason()


def test_a_queue_that_grows_is_not_sustained_whatever_the_limits_say() -> None:
    server = a_server(lambda rate, number: 0.1 + max(0.0, number / 20 - number / rate))  # 20 a second are served
    found = search(server, 1.0, {"tpot": 50.0}, 0.99)
    assert found.best is not None
    assert 20 <= found.best.rate < 25
    assert "open requests grow" in found.reason()


def test_a_load_that_is_over_before_the_engine_is_full_tells_nothing() -> None:
    """Each of 100 requests is open for a second: of 50 a second the second quarter meets 37, and the last 50."""
    found = search(a_server(lambda rate, number: 1.0), 1.0, {"tpot": 50.0}, 0.99)
    assert found.best is not None
    assert 50 < found.best.rate < 65
    assert "too few to tell" in found.reason()


def test_limits_are_read() -> None:
    assert read_limits("ttft=500, tpot=40") == {"ttft": 500.0, "tpot": 40.0}
    for text in ("", "ttft", "ttft=0", "ttft=-1", "ttft=nan", "ttft=inf", "tftt=3", "ttft:500", "ttft=500,"):
        with pytest.raises(ConfigError, match="--slo takes"):
            read_limits(text)
