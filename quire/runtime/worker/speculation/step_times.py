"""How long steps take by how many tokens they have, and drafting by how many drafts, as measured."""

from __future__ import annotations

from bisect import bisect_left

PRIOR_SLOPE = 0.15
"""Before more is known: each further token takes this share of the time of a step of one."""
_FIRST_DRAFT = 0.5
"""The first draft of a row takes as much longer than another, in shares of that one: it is preceded by what was sampled
since the last ones."""
_EXACT = 8
"""Steps of up to so many tokens are told apart; larger ones by powers of two."""
_RATE = 0.1
_MOST = 1.5
"""A time that differs from what is usual by more than this factor counts as this much: the machine was busy."""


class StepTimes:
    """Averages of how long steps take, by their tokens, and straight lines between them."""

    def __init__(self) -> None:
        self._sizes: list[float] = []  # ascending, of the buckets below
        self._times: list[float] = []
        self._buckets: list[int] = []
        self._seen: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def learn(self, tokens: int, ms: float) -> None:
        """Learn how long a step of this many tokens took."""
        bucket = tokens if tokens <= _EXACT else _EXACT + (tokens - 1).bit_length()
        at = bisect_left(self._buckets, bucket)
        if at == len(self._buckets) or self._buckets[at] != bucket:
            self._buckets.insert(at, bucket)
            self._sizes.insert(at, tokens)
            self._times.insert(at, ms)
            self._seen.insert(at, 1)
            return
        self._seen[at] += 1
        rate = max(_RATE, 1 / self._seen[at])
        usual = self._times[at]
        self._times[at] += rate * (min(max(ms, usual / _MOST), usual * _MOST) - usual)
        self._sizes[at] += rate * (tokens - self._sizes[at])

    def of(self, tokens: int) -> float:
        """How many milliseconds a step of this many tokens takes; 0 while nothing is known."""
        sizes, times = self._sizes, self._times
        if not sizes:
            return 0.0
        at = bisect_left(sizes, tokens)
        if 0 < at < len(sizes):
            share = (tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
            return times[at - 1] + share * (times[at] - times[at - 1])
        at = min(at, len(sizes) - 1)
        return times[at] * (1 + PRIOR_SLOPE * (tokens - 1)) / (1 + PRIOR_SLOPE * (sizes[at] - 1))


class DraftingTimes:
    """Averages of how long drafting takes, by number of drafts and rows."""

    def __init__(self) -> None:
        self._by_drafts: dict[int, StepTimes] = {}

    def learn(self, drafts: int, rows: int, ms: float) -> None:
        """Learn how long it took to draft this many tokens for each of this many rows."""
        self._by_drafts.setdefault(drafts, StepTimes()).learn(rows, ms)

    def of(self, drafts: int, rows: int) -> float:
        """How many milliseconds drafting takes; 0 while nothing is known. A number of drafts that was not tried is
        estimated from the nearest one that was."""
        if (own := self._by_drafts.get(drafts)) is not None:
            return own.of(rows)
        if not self._by_drafts:
            return 0.0
        nearest = min(self._by_drafts, key=lambda known: abs(known - drafts))
        return self._by_drafts[nearest].of(rows) * (_FIRST_DRAFT + drafts) / (_FIRST_DRAFT + nearest)
