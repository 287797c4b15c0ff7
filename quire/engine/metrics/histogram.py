"""Counting values into buckets, cheaply enough to do it for every token. Knows nothing about Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from quire.foundation.messages.from_engine import WORK_BOUNDS_S


@dataclass
class Histogram:
    """How many values fell at or under each bound, and their sum.

    Args:
        bounds: Upper bounds, ascending.
        counts: Values in each bucket, and above the last bound; empty for none yet.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.bounds = tuple(self.bounds)
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        """Add what was counted elsewhere. While nothing is counted here, a longer scale replaces this one; counts on
        another scale are left out."""
        if len(other.bounds) > len(self.bounds) and not self.count:
            self.bounds, self.counts = other.bounds, [0] * len(other.counts)
        if other.bounds == self.bounds:
            self.counts = [own + more for own, more in zip(self.counts, other.counts, strict=True)]
            self.sum += other.sum

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, number of values at or under it), as Prometheus wants buckets."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


@dataclass
class WorkTimes:
    """How long the pieces of work of one thread took, in seconds of its processor time."""

    seconds: Histogram = field(default_factory=lambda: Histogram(WORK_BOUNDS_S))
    longest: float = 0.0

    def observe(self, seconds: float) -> None:
        self.seconds.observe(seconds)
        if seconds > self.longest:
            self.longest = seconds


def steps_of_1_2_5(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 … up to `largest`."""
    bounds: list[float] = []
    unit = 1
    while True:
        for digit in (1, 2, 5):
            if digit * unit > largest:
                return bounds or [1.0]
            bounds.append(float(digit * unit))
        unit *= 10
