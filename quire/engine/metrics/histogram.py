"""Counting values into buckets, cheaply enough to do it for every token. Knows nothing about Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class HistogramCounts(NamedTuple):
    """A histogram as it is at a time: counts by bucket, the one above the last bound included."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float


class Histogram:
    """How many values fell at or under each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """
        Args:
            bounds: Upper bounds, ascending; everything above the last counts as well.
        """
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)
        self._kept_counts, self._kept_sum = list(self._counts), 0.0
        self._handed_counts, self._handed_sum = list(self._counts), 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def take_over(self, counts: Sequence[int], sum_: float) -> None:
        """Counts that somebody else has made, by bucket, the one above the last bound included. They take the place of
        those taken over before."""
        self._counts = [kept + count for kept, count in zip(self._kept_counts, counts, strict=True)]
        self.sum = self._kept_sum + sum_

    def keep(self) -> None:
        """Who has made these counts is gone: what is taken over from now on is added to them."""
        self._kept_counts, self._kept_sum = list(self._counts), self.sum

    def hand_over(self, successor: Histogram) -> None:
        """Add to another one what has been counted here since the last call; nothing where its bounds are others."""
        if successor.bounds != self.bounds:
            return
        more = [now - then for now, then in zip(self._counts, self._handed_counts, strict=True)]
        successor._add(more, self.sum - self._handed_sum)
        self._handed_counts, self._handed_sum = list(self._counts), self.sum

    def _add(self, counts: Sequence[int], sum_: float) -> None:
        """For good: what is taken over later is added to these."""
        self._counts = [own + more for own, more in zip(self._counts, counts, strict=True)]
        self._kept_counts = [own + more for own, more in zip(self._kept_counts, counts, strict=True)]
        self.sum, self._kept_sum = self.sum + sum_, self._kept_sum + sum_

    def counts(self) -> HistogramCounts:
        """As it is now."""
        return HistogramCounts(self.bounds, list(self._counts), self.sum)

    def kept(self) -> HistogramCounts:
        """Of what was taken over: what those have made who are gone."""
        return HistogramCounts(self.bounds, list(self._kept_counts), self._kept_sum)

    def go_on_from(self, shown: HistogramCounts, kept: HistogramCounts) -> None:
        """Another process took these over before: all of them, and those of who is gone."""
        self._counts, self.sum = list(shown.counts), shown.sum
        self._kept_counts, self._kept_sum = list(kept.counts), kept.sum

    def add(self, other: HistogramCounts) -> None:
        """Add what was counted elsewhere, for good; nothing where its bounds are others."""
        if other.bounds == self.bounds:
            self._add(other.counts, other.sum)

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, number of values at or under it), as Prometheus wants buckets."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


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
