"""Metrics as values, for programs that do not scrape. Names and types are those of `vllm.v1.metrics.reader`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric as Family


@dataclass(frozen=True)
class Metric:
    """One metric with its labels.

    Attributes:
        name: As /metrics has it, without `_total`, `_bucket`, `_sum` and `_count`.
        labels: By name.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Several counters, one for each place: what has a label `position`."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A number as it is now."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """How often values were at most so large.

    Attributes:
        count, sum: Of all values.
        buckets: By upper bound, as text: how many were at most that.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(families: Iterable[Family]) -> list[Metric]:
    """The metrics of these families that vLLM's names begin with `vllm:`."""
    return [metric for family in families if family.name.startswith("vllm:") for metric in _read(family)]


def _read(family: Family) -> Iterator[Metric]:
    if family.name.endswith("_per_pos"):
        labels = {name: value for name, value in family.samples[0].labels.items() if name != "position"}
        yield Vector(family.name, labels, [int(sample.value) for sample in family.samples])
        return
    if family.type != "histogram":
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.type == "counter":
                yield Counter(family.name, labels, int(sample.value))
            else:
                yield Gauge(family.name, labels, float(sample.value))
        return
    buckets: dict[str, int] = {}
    total = 0.0
    labels = {}
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_sum"):
            total = float(sample.value)
    yield Histogram(family.name, labels, max(buckets.values(), default=0), total, buckets)
