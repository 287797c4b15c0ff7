"""What `quire bench serve` measured, as figures under vLLM's names, and the options that choose among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.foundation.http_client.http1 import HttpError
from quire.foundation.http_client.pool import BlockingClient
from quire.tools.bench.datasets import Sample
from quire.tools.bench.load import Load
from quire.tools.bench.report import Summary, measured_with, percentile_name, summarize

METRICS: dict[str, tuple[str, Callable[[Any], list[float]]]] = {
    "ttft": ("Time to first token", lambda o: [] if o.ttft is None else [o.ttft]),
    "tpot": ("Time per output token (without the first)", lambda o: [] if o.tpot is None else [o.tpot]),
    "itl": ("Inter-token latency", lambda o: o.itls),
    "e2el": ("End-to-end latency", lambda o: [o.e2e_latency]),
}
"""By name: the title, and the values (seconds) of one request, measured (Outcome) or simulated (Served)."""
_COUNTERS = {
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:num_preemptions_total": "preemptions",
}


@dataclass(frozen=True)
class ServingReportOptions:
    """Which figures, and where they go."""

    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """Metrics that are shown: ttft, tpot, itl, e2el, separated by commas."""
    metric_percentiles: str = "99"
    """Percentiles that are shown, separated by commas: 50,90,99.9."""
    goodput: tuple[str, ...] = ()
    """Limits in milliseconds that a good request keeps: ttft:200 tpot:50 e2el:3000."""
    save_result: bool = False
    """Write the result as JSON."""
    save_detailed: bool = False
    """Let the result hold every request's times and text."""
    append_result: bool = False
    """Add the result as a line to the file instead of replacing it."""
    result_dir: str | None = None
    """Directory of the result. Default: this one."""
    result_filename: str | None = None
    """File of the result. Default: made from backend, rate, model and date."""
    label: str | None = None
    """Prefix of the default file name."""
    metadata: tuple[str, ...] = ()
    """Remarks for the result, as NAME=VALUE."""
    plot: str | None = None
    """Write an SVG with load, throughput and latencies to this file."""

    def __post_init__(self) -> None:
        shown_metrics(self)
        percentiles_of(self)
        _limits(self)
        _pairs(self)


@dataclass(frozen=True)
class Run:
    """A measured load: also the command's options, and what the server counted meanwhile, see `read_counters`."""

    settings: Any
    options: ServingReportOptions
    model: str
    seed: int
    load: Load
    samples: Sequence[Sample]
    counted: dict[str, float]


def read_counters(http: BlockingClient) -> dict[str, float]:
    """Sums over the server's engines, from /metrics; without the counters that the server does not report.

    They tell whether caches or drafts flattered the figures.
    """
    try:
        status, page = http.ask("GET", "/metrics")
    except HttpError:
        return {}
    found: dict[str, float] = {}
    for line in page.decode(errors="replace").splitlines() if status == 200 else ():
        name = _COUNTERS.get(line.partition("{")[0].partition(" ")[0])
        if name is not None:
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def figures(run: Run) -> dict[str, Any]:
    """All figures, as plain data for JSON."""
    arrivals = run.settings.arrivals
    result = {
        **measured_with(run.settings),
        "backend": run.settings.backend,
        "model_id": run.model,
        "request_rate": f"{arrivals.request_rate:g}",
        "burstiness": arrivals.burstiness,
        "max_concurrency": arrivals.max_concurrency,
        "seed": run.seed,
        "metadata": _pairs(run.options),
        **_throughput(run),
        **_fairness(run),
    }
    for name, (_, values) in METRICS.items():
        measured = [value * 1e3 for outcome in run.load.completed for value in values(outcome)]
        result |= _in_milliseconds(name, summarize(measured, percentiles_of(run.options)))
    return result | (_details(run.load) if run.options.save_detailed else {})


def _throughput(run: Run) -> dict[str, Any]:
    load, done = run.load, run.load.completed
    inputs, outputs = sum(o.prompt_tokens for o in done), sum(o.output_tokens for o in done)
    limits = _limits(run.options)
    good = sum(is_good(outcome, limits) for outcome in done)
    return {
        "num_prompts": len(run.samples),
        "completed": len(done),
        "failed": len(load.outcomes) - len(done),
        "duration": load.duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / load.duration,
        "request_goodput": good / load.duration if limits else None,
        "output_throughput": outputs / load.duration,
        "total_token_throughput": (inputs + outputs) / load.duration,
        "max_output_tokens_per_s": load.peak_token_rate(),
        "max_concurrent_requests": max((open_now for _, open_now in load.in_flight()), default=0),
    }


def _fairness(run: Run) -> dict[str, Any]:
    """What may have distorted the figures: caches, drafts, a slow client."""
    done = run.load.completed
    inputs = sum(outcome.prompt_tokens for outcome in done)
    cached = [outcome.cached_tokens for outcome in done if outcome.cached_tokens is not None]
    hit_rate = _share(run.counted, "prefix_hits", "prefix_queries")
    if hit_rate is None and cached and inputs:
        hit_rate = sum(cached) / inputs
    return {
        "prefix_cache_hit_rate": hit_rate,
        "spec_decode_acceptance_rate": _share(run.counted, "accepted", "drafted"),
        "preemptions": run.counted.get("preemptions"),
        "client_cpu": run.load.client_cpu,
        "latest_send_s": run.load.max_send_delay,
    }


def _share(counted: dict[str, float], part: str, whole: str) -> float | None:
    return counted[part] / counted[whole] if part in counted and counted.get(whole) else None


def _in_milliseconds(name: str, summary: Summary) -> dict[str, float]:
    return {
        f"mean_{name}_ms": summary.mean,
        f"median_{name}_ms": summary.median,
        f"std_{name}_ms": summary.std,
        f"ci95_{name}_ms": summary.ci95,
        **{f"{percentile_name(wanted)}_{name}_ms": value for wanted, value in summary.percentiles.items()},
    }


def _details(load: Load) -> dict[str, Any]:
    outcomes = load.outcomes
    return {
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "start_times": [o.start - load.begin for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itls for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def is_good(request: Any, limits: Mapping[str, float]) -> bool:
    """Whether a request kept all limits, in milliseconds by metric. A limit of `itl` holds for each gap."""
    return all(value * 1e3 <= limit for name, limit in limits.items() for value in METRICS[name][1](request))


def shown_metrics(options: ServingReportOptions) -> list[str]:
    """Names of the metrics that --percentile-metrics asks for."""
    names = [name for name in options.percentile_metrics.split(",") if name]
    if unknown := [name for name in names if name not in METRICS]:
        raise ConfigError(f"--percentile-metrics knows {', '.join(METRICS)}, not '{unknown[0]}'.")
    return names


def percentiles_of(options: ServingReportOptions) -> list[float]:
    """The percentiles that --metric-percentiles asks for, in 0 to 100."""
    try:
        values = [float(text) for text in options.metric_percentiles.split(",") if text]
    except ValueError as error:
        raise ConfigError(f"--metric-percentiles: {error}.", param="metric_percentiles") from error
    if any(not 0 <= value <= 100 for value in values):
        raise ConfigError("--metric-percentiles are between 0 and 100.", param="metric_percentiles")
    return values


def _limits(options: ServingReportOptions) -> dict[str, float]:
    limits = {}
    for pair in options.goodput:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in ("ttft", "tpot", "e2el") or not limits[name] > 0:
            raise ConfigError(f"--goodput takes ttft:MS, tpot:MS and e2el:MS, not '{pair}'.", param="goodput")
    return limits


def _pairs(options: ServingReportOptions) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in options.metadata]
    if any(not equals for _, equals, _ in pairs):
        raise ConfigError("--metadata takes NAME=VALUE.", param="metadata")
    return {name: value for name, _, value in pairs}
