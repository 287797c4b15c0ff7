"""Mean, median, spread and percentiles of measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev


@dataclass(frozen=True)
class Summary:
    """Of values in any unit; all zero when there are none.

    Attributes:
        ci95: Half the width of the mean's 95% confidence interval (normal approximation).
        percentiles: Value by percentile.
    """

    mean: float
    median: float
    std: float
    ci95: float
    percentiles: dict[float, float]


def summarize(values: Sequence[float], percentiles: Sequence[float]) -> Summary:
    """Summary of `values`."""
    if not values:
        return Summary(0.0, 0.0, 0.0, 0.0, dict.fromkeys(percentiles, 0.0))
    ordered = sorted(values)
    std = pstdev(ordered)
    return Summary(
        mean=fmean(ordered),
        median=percentile(ordered, 50),
        std=std,
        ci95=1.96 * std / math.sqrt(len(ordered)),
        percentiles={wanted: percentile(ordered, wanted) for wanted in percentiles},
    )


def percentile(ordered: Sequence[float], wanted: float) -> float:
    """By linear interpolation between the closest ranks, as numpy's default.

    Args:
        ordered: Ascending, not empty.
        wanted: In 0..100.
    """
    position = (len(ordered) - 1) * wanted / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def percentile_name(wanted: float) -> str:
    """99 → `p99`, 99.9 → `p99.9`."""
    return f"p{wanted:g}"
