"""What a simulated load came to: percentiles of times, throughput, goodput, and how full the engine was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from quire.tools.bench.report import Row, percentile, percentile_name, table
from quire.tools.simulation.engine import Occupancy, Served, SimulatedRun

PERCENTILES = (50.0, 90.0, 99.0)
METRICS: dict[str, tuple[str, Callable[[Served], Sequence[float]]]] = {
    "ttft": ("Time to first token", lambda each: [each.ttft]),
    "tpot": ("Time per output token", lambda each: [] if each.tpot is None else [each.tpot]),
    "itl": ("Inter-token latency", lambda each: each.itls),
    "e2el": ("End-to-end latency", lambda each: [each.e2e]),
    "queue": ("Time in the queue", lambda each: [each.queued]),
}
"""By vLLM's name: what it is, and its values (seconds) in one request."""


@dataclass(frozen=True)
class Usage:
    """How full the engine was, over the time of the load.

    Attributes:
        running: Requests that were computed, on average.
        max_running, max_waiting: Most at a time.
        kv_share, max_kv_share: Of the KV cache, on average and at most.
    """

    running: float
    max_running: int
    max_waiting: int
    kv_share: float
    max_kv_share: float


@dataclass(frozen=True)
class Figures:
    """Of a run.

    Attributes:
        requests: How many were served.
        seconds: From the first arrival to the last token.
        input_tokens, output_tokens: In all.
        cached: The share of prompt tokens that the prefix cache had.
        preemptions: In all.
        busy: The share of the time in which the device computed.
        usage: How full the engine was.
        good: Requests that kept all limits; None: there were none.
        means: Milliseconds by metric.
        milliseconds: Percentiles by metric.
    """

    requests: int
    seconds: float
    input_tokens: int
    output_tokens: int
    cached: float
    preemptions: int
    busy: float
    usage: Usage
    good: int | None
    means: Mapping[str, float]
    milliseconds: Mapping[str, Mapping[float, float]]

    @property
    def goodput_share(self) -> float:
        """Of the requests."""
        return 1.0 if self.good is None else self.good / self.requests

    def as_json(self) -> dict[str, Any]:
        """Under the names of `quire bench serve`, and vLLM's metrics where that has none."""
        times = {
            f"{percentile_name(p)}_{name}_ms": ms
            for name, found in self.milliseconds.items()
            for p, ms in found.items()
        }
        return {
            "completed": self.requests,
            "duration": self.seconds,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.requests / self.seconds,
            "request_goodput": None if self.good is None else self.good / self.seconds,
            "output_throughput": self.output_tokens / self.seconds,
            "total_token_throughput": (self.input_tokens + self.output_tokens) / self.seconds,
            "prefix_cache_hit_rate": self.cached,
            "preemptions": self.preemptions,
            "device_busy": self.busy,
            "mean_num_requests_running": self.usage.running,
            "max_num_requests_running": self.usage.max_running,
            "max_num_requests_waiting": self.usage.max_waiting,
            "mean_kv_cache_usage": self.usage.kv_share,
            "max_kv_cache_usage": self.usage.max_kv_share,
            **{f"mean_{name}_ms": ms for name, ms in self.means.items()},
            **times,
        }

    def as_text(self) -> str:
        """A table."""
        usage = self.usage
        rows: list[Row] = [
            ("Requests", f"{self.requests:,}"),
            ("Simulated seconds", f"{self.seconds:,.2f}"),
            ("Requests a second", f"{self.requests / self.seconds:,.2f}"),
            ("Output tokens a second", f"{self.output_tokens / self.seconds:,.1f}"),
            ("Tokens a second, prompts included", f"{(self.input_tokens + self.output_tokens) / self.seconds:,.1f}"),
            ("Prompt tokens from the prefix cache", f"{self.cached:.1%}"),
            ("Preemptions", f"{self.preemptions:,}"),
            ("Device busy", f"{self.busy:.1%}"),
            ("Requests running: mean, most", f"{usage.running:,.1f}, {usage.max_running:,}"),
            ("Requests waiting: most", f"{usage.max_waiting:,}"),
            ("KV cache in use: mean, most", f"{usage.kv_share:.1%}, {usage.max_kv_share:.1%}"),
        ]
        if self.good is not None:
            rows.append(("Requests within the limits", f"{self.goodput_share:.1%}"))
        times = [
            (f"{METRICS[name][0]}, {percentile_name(p)} (ms)", f"{ms:,.2f}")
            for name, found in self.milliseconds.items()
            for p, ms in found.items()
        ]
        return table("Simulation", [("", rows), ("latency", times)])


def figures(
    run: SimulatedRun, limits: Mapping[str, float] | None = None, percentiles: Sequence[float] = PERCENTILES
) -> Figures:
    """Of a run.

    Args:
        limits: Milliseconds by metric that a good request keeps.
        percentiles: Which.
    """
    served, means, milliseconds = run.served, {}, {}
    for name, (_, values) in METRICS.items():
        ordered = sorted(1e3 * value for each in served for value in values(each))
        if ordered:
            means[name] = fmean(ordered)
            milliseconds[name] = {p: percentile(ordered, p) for p in percentiles}
    good = None if not limits else sum(is_good(each, limits) for each in served)
    prompts = sum(each.prompt for each in served)
    return Figures(
        len(served),
        run.seconds,
        prompts,
        sum(len(each.times) for each in served),
        sum(each.cached for each in served) / prompts,
        sum(each.preemptions for each in served),
        run.busy,
        _usage(run.occupancy),
        good,
        means,
        milliseconds,
    )


def is_good(each: Served, limits: Mapping[str, float]) -> bool:
    """Whether a request kept limits, in milliseconds by metric: each gap between tokens, if `itl` has one."""
    return all(1e3 * value <= limit for name, limit in limits.items() for value in METRICS[name][1](each))


def _usage(occupancy: Sequence[Occupancy]) -> Usage:
    """Each state lasts until the next step has ended."""
    lasted = [after.time - before.time for before, after in pairwise(occupancy)]
    seconds = sum(lasted) or 1.0
    weighted = list(zip(occupancy, [*lasted, 0.0], strict=True))
    return Usage(
        sum(each.running * time for each, time in weighted) / seconds,
        max(each.running for each in occupancy),
        max(each.waiting for each in occupancy),
        sum(each.kv_share * time for each, time in weighted) / seconds,
        max(each.kv_share for each in occupancy),
    )
