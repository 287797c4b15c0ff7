"""How many tokens each step moved forward by, counted into buckets for the metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from quire.messages import STEP_TOKEN_BOUNDS


class StepTokens:
    """Counts since the start.

    Attributes:
        counts: By bucket of STEP_TOKEN_BOUNDS, and one more for what lies above.
        sum: Of all tokens.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self.sum = 0

    def observe(self, rows: Sequence[int]) -> None:
        """A step of rows that move forward by so many tokens each."""
        tokens = sum(rows)
        self.counts[bisect_left(STEP_TOKEN_BOUNDS, tokens)] += 1
        self.sum += tokens
