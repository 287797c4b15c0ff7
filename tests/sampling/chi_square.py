"""Do counts follow a distribution? Pearson's statistic and its critical values, without a statistics library."""

from __future__ import annotations

import math
from collections.abc import Sequence

_NORMAL_AT = {1e-3: 3.0902, 1e-4: 3.7190, 1e-6: 4.7534}
"""Upper quantiles of the normal distribution."""


def statistic(counts: Sequence[float], probabilities: Sequence[float]) -> tuple[float, int]:
    """Pearson's chi-square and its degrees of freedom; cells that expect less than 5 are put together.

    An impossible cell that was counted makes it infinite.
    """
    total, norm = sum(counts), sum(probabilities)
    value, cells, rest_seen, rest_expected = 0.0, 0, 0.0, 0.0
    for seen, probability in zip(counts, probabilities, strict=True):
        expected = total * probability / norm
        if expected == 0:
            if seen:
                return math.inf, 1
        elif expected < 5:
            rest_seen, rest_expected = rest_seen + seen, rest_expected + expected
        else:
            value, cells = value + (seen - expected) ** 2 / expected, cells + 1
    if rest_expected >= 1:
        value, cells = value + (rest_seen - rest_expected) ** 2 / rest_expected, cells + 1
    return value, max(1, cells - 1)


def critical(freedom: int, level: float) -> float:
    """The value that chance exceeds with probability `level` (Wilson and Hilferty 1931: the cube root of chi-square
    over its degrees of freedom is nearly normal)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + _NORMAL_AT[level] * math.sqrt(spread)) ** 3)
