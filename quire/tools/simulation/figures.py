"""What came of a simulated load: percentiles of times, throughput, goodput, and how full the engine was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from quire.tools.bench import serving_figures
from quire.tools.bench.report import Row, percentile, percentile_name, table
from quire.tools.simulation.engine import SimulatedRun

PERCENTILES = (50.0, 90.0, 99.0)
METRICS = serving_figures.METRICS | {
    "tpot": ("Time per output token", serving_figures.METRICS["tpot"][1]),
    "queue": ("Time in the queue", lambda each: [each.queued]),
}
"""By vLLM's name: the title, and the values (seconds) of one request."""


@dataclass(frozen=True)
class Figures:
    """The figures of a run.

    Attributes:
        seconds: From the first arrival to the last token.
        cached: Share of prompt tokens that the prefix cache had.
        busy: Share of the time in which the device computed.
        running, max_running: Requests in a step, on average over the time and at most.
        kv_share, max_kv_share: Share of the KV cache in use, on average over the time and at most.
        good: Requests that kept all limits; None if there are no limits.
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
    running: float
    max_running: int
    max_waiting: int
    kv_share: float
    max_kv_share: float
    good: int | None
    means: Mapping[str, float]
    milliseconds: Mapping[str, Mapping[float, float]]

    @property
    def goodput_share(self) -> float:
        """Share of the requests that kept all limits; 1 if there are none."""
        return 1.0 if self.good is None else self.good / self.requests

    def as_json(self) -> dict[str, Any]:
        """The figures under the names of `quire bench serve`, or of vLLM's metrics where that has none."""
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
            "mean_num_requests_running": self.running,
            "max_num_requests_running": self.max_running,
            "max_num_requests_waiting": self.max_waiting,
            "mean_kv_cache_usage": self.kv_share,
            "max_kv_cache_usage": self.max_kv_share,
            **{f"mean_{name}_ms": ms for name, ms in self.means.items()},
            **times,
        }

    def as_text(self) -> str:
        rows: list[Row] = [
            ("Requests", f"{self.requests:,}"),
            ("Simulated seconds", f"{self.seconds:,.2f}"),
            ("Requests a second", f"{self.requests / self.seconds:,.2f}"),
            ("Output tokens a second", f"{self.output_tokens / self.seconds:,.1f}"),
            ("Tokens a second, prompts included", f"{(self.input_tokens + self.output_tokens) / self.seconds:,.1f}"),
            ("Prompt tokens from the prefix cache", f"{self.cached:.1%}"),
            ("Preemptions", f"{self.preemptions:,}"),
            ("Device busy", f"{self.busy:.1%}"),
            ("Requests running: mean, most", f"{self.running:,.1f}, {self.max_running:,}"),
            ("Requests waiting: most", f"{self.max_waiting:,}"),
            ("KV cache in use: mean, most", f"{self.kv_share:.1%}, {self.max_kv_share:.1%}"),
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
    """The figures of a run. `limits` are the milliseconds, by metric, that a good request keeps."""
    served, means, milliseconds = run.served, {}, {}
    for name, (_, values) in METRICS.items():
        ordered = sorted(1e3 * value for each in served for value in values(each))
        if ordered:
            means[name] = fmean(ordered)
            milliseconds[name] = {p: percentile(ordered, p) for p in percentiles}
    good = None if not limits else sum(serving_figures.is_good(each, limits) for each in served)
    prompts = sum(each.prompt for each in served)
    states = run.occupancy
    lasted = [after.time - before.time for before, after in pairwise(states)] + [0.0]  # until the next step has ended
    seconds = sum(lasted) or 1.0
    return Figures(
        requests=len(served),
        seconds=run.seconds,
        input_tokens=prompts,
        output_tokens=sum(len(each.times) for each in served),
        cached=sum(each.cached for each in served) / prompts,
        preemptions=sum(each.preemptions for each in served),
        busy=run.busy,
        running=sum(state.running * time for state, time in zip(states, lasted, strict=True)) / seconds,
        max_running=max(state.running for state in states),
        max_waiting=max(state.waiting for state in states),
        kv_share=sum(state.kv_share * time for state, time in zip(states, lasted, strict=True)) / seconds,
        max_kv_share=max(state.kv_share for state in states),
        good=good,
        means=means,
        milliseconds=milliseconds,
    )
