"""What a simulated load came to: percentiles of times, throughput, goodput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.report import table
from quire.bench.summary import percentile
from quire.simulation.engine import Served, SimulatedRun

PERCENTILES = (50, 90, 99)
METRICS: dict[str, tuple[str, Callable[[Served], Sequence[float]]]] = {
    "ttft": ("Time to first token", lambda each: [each.ttft]),
    "tpot": ("Time per output token", lambda each: [] if each.tpot is None else [each.tpot]),
    "itl": ("Inter-token latency", lambda each: each.itls),
    "e2el": ("End-to-end latency", lambda each: [each.e2e]),
}
"""By vLLM's name: what it is, and its values (seconds) in one request."""


@dataclass(frozen=True)
class Figures:
    """Of a run.

    Attributes:
        requests: How many were served.
        seconds: From the first arrival to the last token.
        output_tokens: In all.
        cached: The share of prompt tokens that the prefix cache had.
        preemptions: In all.
        busy: The share of the time in which the device computed.
        good: Requests that kept all limits; None: there were none.
        milliseconds: Percentiles by metric.
    """

    requests: int
    seconds: float
    output_tokens: int
    cached: float
    preemptions: int
    busy: float
    good: int | None
    milliseconds: Mapping[str, Mapping[int, float]]

    @property
    def goodput_share(self) -> float:
        """Of the requests."""
        return 1.0 if self.good is None else self.good / self.requests

    def as_json(self) -> dict[str, Any]:
        """Under the names of `quire bench serve`."""
        times = {f"p{p}_{name}_ms": ms for name, found in self.milliseconds.items() for p, ms in found.items()}
        return {
            "completed": self.requests,
            "duration": self.seconds,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.requests / self.seconds,
            "request_goodput": None if self.good is None else self.good / self.seconds,
            "output_throughput": self.output_tokens / self.seconds,
            "prefix_cache_hit_rate": self.cached,
            "preemptions": self.preemptions,
            "device_busy": self.busy,
            **times,
        }

    def as_text(self) -> str:
        """A table."""
        rows = [
            ("Requests", f"{self.requests:,}"),
            ("Simulated seconds", f"{self.seconds:,.2f}"),
            ("Requests a second", f"{self.requests / self.seconds:,.2f}"),
            ("Output tokens a second", f"{self.output_tokens / self.seconds:,.1f}"),
            ("Prompt tokens from the prefix cache", f"{self.cached:.1%}"),
            ("Preemptions", f"{self.preemptions:,}"),
            ("Device busy", f"{self.busy:.1%}"),
        ]
        if self.good is not None:
            rows.append(("Requests within the limits", f"{self.goodput_share:.1%}"))
        times = [
            (f"{METRICS[name][0]}, p{p} (ms)", f"{ms:,.2f}")
            for name, found in self.milliseconds.items()
            for p, ms in found.items()
        ]
        return table("Simulation", [("", rows), ("latency", times)])


def figures(run: SimulatedRun, limits: Mapping[str, float] | None = None) -> Figures:
    """Of a run.

    Args:
        limits: Milliseconds by metric that a good request keeps.
    """
    served = run.served
    milliseconds = {}
    for name, (_, values) in METRICS.items():
        ordered = sorted(1e3 * value for each in served for value in values(each))
        milliseconds[name] = {p: percentile(ordered, p) for p in PERCENTILES} if ordered else {}
    good = None if not limits else sum(_is_good(each, limits) for each in served)
    return Figures(
        len(served),
        run.seconds,
        sum(len(each.times) for each in served),
        sum(each.cached for each in served) / sum(each.prompt for each in served),
        sum(each.preemptions for each in served),
        run.busy,
        good,
        milliseconds,
    )


def _is_good(each: Served, limits: Mapping[str, float]) -> bool:
    return all(1e3 * value <= limit for name, limit in limits.items() for value in METRICS[name][1](each))
