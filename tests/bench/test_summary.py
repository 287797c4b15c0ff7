"""Percentiles as numpy has them."""

from __future__ import annotations

import random

import numpy
import pytest

from quire.tools.bench.report import percentile_name, summarize


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_as_numpy(count: int) -> None:
    rng = random.Random(count)
    values = [rng.expovariate(1) for _ in range(count)]
    wanted = [0, 1, 25, 50, 90, 99, 99.9, 100]
    found = summarize(values, wanted)
    assert list(found.percentiles.values()) == pytest.approx(list(numpy.percentile(values, wanted)))
    assert found.mean == pytest.approx(numpy.mean(values))
    assert found.median == pytest.approx(numpy.median(values))
    assert found.std == pytest.approx(numpy.std(values))
    assert found.ci95 == pytest.approx(1.96 * numpy.std(values) / count**0.5)


def test_nothing_measured() -> None:
    assert summarize([], [99]).percentiles == {99: 0.0}


def test_names() -> None:
    assert [percentile_name(value) for value in (50.0, 99.9)] == ["p50", "p99.9"]
