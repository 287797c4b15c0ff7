"""Arrival times: the promised rate, the promised unevenness, the promised ramp."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.tools.bench.load import ArrivalOptions, arrival_times


def times(count: int, **options: Any) -> list[float]:
    return arrival_times(ArrivalOptions(**options), count, random.Random(1))


def test_without_a_rate_all_come_at_once() -> None:
    assert times(5) == [0.0] * 5


def test_the_rate_is_kept_exactly_and_the_gaps_are_random() -> None:
    found = times(2001, request_rate=10.0)
    gaps = [b - a for a, b in pairwise(found)]
    assert found[0] == 0
    assert found[-1] == pytest.approx(200)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1, abs=0.1)  # a Poisson process


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (4.0, 0.5), (10_000.0, 0.01)])
def test_burstiness_is_the_gamma_shape(burstiness: float, spread: float) -> None:
    gaps = [b - a for a, b in pairwise(times(4001, request_rate=10.0, burstiness=burstiness))]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(spread, rel=0.15)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_rate_to_rate(strategy: Any) -> None:
    options: dict[str, Any] = {"ramp_up_strategy": strategy, "ramp_up_start_rps": 2.0, "ramp_up_end_rps": 50.0}
    gaps = [b - a for a, b in pairwise(times(20_001, burstiness=1000.0, **options))]
    assert 1 / fmean(gaps[:100]) == pytest.approx(2, rel=0.1)
    assert 1 / fmean(gaps[-100:]) == pytest.approx(50, rel=0.1)
    middle = 1 / fmean(gaps[9_950:10_050])
    assert middle == pytest.approx(26 if strategy == "linear" else 10, rel=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"request_rate": 0.0},
        {"burstiness": -1.0},
        {"max_concurrency": 0},
        {"ramp_up_strategy": "linear"},
        {"ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0},
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 0.0},
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0, "request_rate": 3.0},
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--"):
        ArrivalOptions(**options)
