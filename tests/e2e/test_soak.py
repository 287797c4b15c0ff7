"""Three minutes of everything at once; an hour of it is `python -m benchmarks.soak --minutes 60`."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from benchmarks.soak import Samples, soak
from tests.e2e.process_usage import Usage


@pytest.mark.long("reliability")
def test_nothing_grows_and_nothing_is_left_behind() -> None:
    assert soak(3.0) == []


def samples(per_minute: float, busy: Callable[[float], float] = lambda at: 0.0) -> Samples:
    """An hour of a process of 100 MB and some noise: what it grows by, and which share of the time it takes half as
    much again."""
    rng = random.Random(0)
    times = [number / 10 for number in range(600)]
    sizes = [int((10**8 + per_minute * at) * (1.5 if rng.random() < busy(at) else 1)) for at in times]
    noise = [(-1) ** number * 40_000 for number in range(600)]
    return Samples(times, [{"api": Usage(1, size + more)} for size, more in zip(sizes, noise, strict=True)])


def test_growth_is_told_from_noise_and_from_what_is_taken_for_a_moment() -> None:
    assert abs(samples(0).growth("api", since=15)) < 1e-3
    assert 0.022 < samples(50_000).growth("api", since=15) < 0.0226, "45 minutes of 50 kB, to 100.75 MB before them"
    assert abs(samples(0, lambda at: at / 100).growth("api", since=15)) < 2e-3
    assert samples(50_000, lambda at: at / 100).growth("api", since=15) > 0.02


def test_a_helper_is_judged_while_it_lives() -> None:
    usages = [{"api": Usage(1, pids=frozenset([1]))} for _ in range(4)]
    for number, sample in enumerate(usages[:3]):
        sample["helper"] = Usage(1, pids=frozenset([7 + number // 2]))
    some = Samples([0.0, 1.0, 2.0, 3.0], usages)
    assert some.lived("api", since=0)
    assert not some.lived("helper", since=0), "replaced"
    assert not some.lived("helper", since=2), "ended"
