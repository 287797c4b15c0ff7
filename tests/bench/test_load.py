"""Figures of many requests together, from outcomes whose times are known."""

from __future__ import annotations

import pytest

from quire.tools.bench.client import Outcome
from quire.tools.bench.load import Load


def outcome(start: float, first: float, gaps: list[float], tokens: int, error: str = "") -> Outcome:
    last = start + first + sum(gaps)
    return Outcome(start, 10, tokens, None, first, last, last + 0.1, gaps, "", error)


def load(*outcomes: Outcome, duration: float = 10.0) -> Load:
    return Load(list(outcomes), 100.0, duration, 0.1, 0.0)


def test_requests_in_flight() -> None:
    flight = load(outcome(100.0, 1.0, [1.0], 2), outcome(101.0, 0.4, [], 1)).in_flight()
    assert [(pytest.approx(at), count) for at, count in flight] == [(0.0, 1), (1.0, 2), (1.5, 1), (2.1, 0)]


def test_the_peak_rate_is_of_any_second() -> None:
    steady = outcome(100.0, 0.5, [0.5] * 9, 10)  # one token each half second
    burst = outcome(103.9, 0.1, [0.1] * 4, 10)  # two tokens an event, from 4.0 to 4.4
    assert load(steady).peak_token_rate() == 2
    assert load(steady, burst).peak_token_rate() == pytest.approx(12)
    assert load(outcome(100.0, 0.1, [], 1), duration=0.5).peak_token_rate() == 2


def test_rates_by_part_hold_every_token_of_what_succeeded() -> None:
    edges, rates = load(outcome(100.0, 0.5, [0.5] * 9, 10), outcome(100.0, 1.0, [], 99, "failed")).token_rates(5)
    assert edges == [0, 2, 4, 6, 8, 10]
    assert sum(rates[:-1]) * 2 == pytest.approx(10)
    assert rates[-1] == rates[-2]


def test_only_requests_without_an_error_are_completed() -> None:
    measured = load(outcome(100.0, 1.0, [], 1), outcome(100.0, 1.0, [], 1, "no"))
    assert len(measured.completed) == 1
