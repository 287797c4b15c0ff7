"""Metrics as values, for programs that do not scrape. Names and types are those of `vllm.v1.metrics.reader`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric as Family


@dataclass(frozen=True)
class Metric:
    """One metric with its labels. Its name is that of /metrics without `_total`, `_bucket`, `_sum` and `_count`."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Several counters, one for each value of a label `position`."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A number as it is now."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """How many values were at most each upper bound (as text)."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(families: Iterable[Family]) -> list[Metric]:
    """The metrics of the families whose names begin with `vllm:`."""
    return [metric for family in families if family.name.startswith("vllm:") for metric in _read(family)]


def _read(family: Family) -> Iterator[Metric]:
    if family.name.endswith("_per_pos"):
        labels = {name: value for name, value in family.samples[0].labels.items() if name != "position"}
        yield Vector(family.name, labels, [int(sample.value) for sample in family.samples])
    elif family.type == "histogram":
        yield _read_histogram(family)
    else:
        for sample in family.samples:
            if family.type == "counter":
                yield Counter(family.name, dict(sample.labels), int(sample.value))
            else:
                yield Gauge(family.name, dict(sample.labels), float(sample.value))


def _read_histogram(family: Family) -> Histogram:
    counted = [sample for sample in family.samples if sample.name.endswith("_bucket")]
    labels = {name: value for name, value in counted[-1].labels.items() if name != "le"}
    buckets = {sample.labels["le"]: int(sample.value) for sample in counted}
    total = next(float(sample.value) for sample in family.samples if sample.name.endswith("_sum"))
    return Histogram(family.name, labels, max(buckets.values()), total, buckets)
