"""Three minutes of everything at once; an hour of it is `python -m benchmarks.soak --minutes 60`."""

from __future__ import annotations

import pytest

from benchmarks.soak import Samples, soak
from tests.e2e.process_usage import Usage


@pytest.mark.long("reliability")
def test_nothing_grows_and_nothing_is_left_behind() -> None:
    assert soak(3.0) == []


def test_growth_is_told_from_noise() -> None:
    def samples(per_minute: float) -> Samples:
        times = [number / 10 for number in range(600)]
        noise = [(-1) ** number * 40_000 for number in range(600)]
        sizes = [int(10**8 + per_minute * at + more) for at, more in zip(times, noise, strict=True)]
        return Samples(times, [{"api": Usage(1, size)} for size in sizes])

    assert abs(samples(0).growth("api", since=15)) < 1e-3
    assert 0.022 < samples(50_000).growth("api", since=15) < 0.0226, "45 minutes of 50 kB, to 100.75 MB before them"
