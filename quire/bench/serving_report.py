"""What `quire bench serve` says of a run: a table, a result file with vLLM's names, a plot.

Owns which figures there are and the warnings about those that flatter. Knows nothing about how the load was made.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.bench.client import Outcome
from quire.bench.datasets import Sample
from quire.bench.load import Load
from quire.bench.plot import Line, Panel, svg
from quire.bench.report import Row, measured_with, table, write_json, write_text
from quire.bench.server_counters import ServerCounters
from quire.bench.summary import Summary, percentile_name, summarize
from quire.errors import ConfigError

METRICS: dict[str, tuple[str, Callable[[Outcome], list[float]]]] = {
    "ttft": ("Time to first token", lambda o: [] if o.first is None else [o.first]),
    "tpot": ("Time per output token (without the first)", lambda o: [] if o.per_token is None else [o.per_token]),
    "itl": ("Inter-token latency", lambda o: o.gaps),
    "e2el": ("End-to-end latency", lambda o: [o.whole]),
}
FLATTERING_HIT_RATE = 0.01
BUSY_CLIENT = 0.8
MOST_ERRORS_SHOWN = 5


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


@dataclass(frozen=True)
class Run:
    """A measured load, and where it came from.

    Attributes:
        settings: The command's options, for the result.
        counted: What the server counted meanwhile.
    """

    settings: Any
    options: ServingReportOptions
    model: str
    seed: int
    load: Load
    samples: Sequence[Sample]
    counted: ServerCounters


def check_report_options(options: ServingReportOptions) -> None:
    """Refuse what cannot be meant, before anything is measured.

    Raises:
        ConfigError: The message names the flag.
    """
    _shown_metrics(options)
    _percentiles(options)
    _limits(options)
    _pairs(options)


def publish(run: Run) -> None:
    """Print the table and the warnings, and write the files that were asked for.

    Raises:
        ConfigError: A file cannot be written.
    """
    result = _result(run)
    print(_table(run, result))
    for warning in _warnings(run, result):
        print(f"quire: warning: {warning}", file=sys.stderr)
    if run.options.plot is not None:
        write_text(run.options.plot, svg(_panels(run.load)))
    if run.options.save_result or run.options.append_result:
        file = Path(run.options.result_dir or ".") / (run.options.result_filename or _file_name(run))
        write_json(file, result, append=run.options.append_result)
        print(f"Result written to {file}")


def _result(run: Run) -> dict[str, Any]:
    load, done = run.load, run.load.completed
    inputs, outputs = sum(o.prompt_tokens for o in done), sum(o.output_tokens for o in done)
    cached = [o.cached_tokens for o in done if o.cached_tokens is not None]
    hit_rate = run.counted.prefix_hit_rate
    if hit_rate is None and cached and inputs:
        hit_rate = sum(cached) / inputs
    limits = _limits(run.options)
    good = sum(_is_good(outcome, limits) for outcome in done)
    result = {
        **measured_with(run.settings),
        "model_id": run.model,
        "seed": run.seed,
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
        "max_output_tokens_per_s": max(load.tokens_by_second()),
        "max_concurrent_requests": max((open_now for _, open_now in load.in_flight()), default=0),
        "prefix_cache_hit_rate": hit_rate,
        "spec_decode_acceptance_rate": run.counted.acceptance_rate,
        "preemptions": run.counted.preemptions,
        "client_cpu": load.client_cpu,
        "latest_send_s": load.latest,
        "metadata": _pairs(run.options),
    }
    for name, (_, values) in METRICS.items():
        summary = summarize([v * 1e3 for outcome in done for v in values(outcome)], _percentiles(run.options))
        result |= _in_milliseconds(name, summary)
    return result | (_details(load) if run.options.save_detailed else {})


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
        "ttfts": [o.first for o in outcomes],
        "itls": [o.gaps for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def _table(run: Run, result: dict[str, Any]) -> str:
    rows: list[Row] = [
        ("Successful requests", f"{result['completed']}"),
        ("Failed requests", f"{result['failed']}"),
        ("Duration (s)", f"{result['duration']:.2f}"),
        ("Input tokens", f"{result['total_input_tokens']}"),
        ("Output tokens", f"{result['total_output_tokens']}"),
        ("Request throughput (req/s)", f"{result['request_throughput']:.2f}"),
        ("Output token throughput (tok/s)", f"{result['output_throughput']:.2f}"),
        ("Total token throughput (tok/s)", f"{result['total_token_throughput']:.2f}"),
        ("Peak output token throughput (tok/s)", f"{result['max_output_tokens_per_s']}"),
        ("Peak concurrent requests", f"{result['max_concurrent_requests']}"),
    ]
    if result["request_goodput"] is not None:
        rows.insert(6, ("Request goodput (req/s)", f"{result['request_goodput']:.2f}"))
    fairness: list[Row] = [
        ("Seed", f"{run.seed}"),
        ("Prefix cache hits", _as_share(result["prefix_cache_hit_rate"])),
        ("Draft acceptance", _as_share(result["spec_decode_acceptance_rate"])),
        ("Client CPU", _as_share(result["client_cpu"])),
    ]
    sections: list[tuple[str, list[Row]]] = [("", rows), ("What to know about these figures", fairness)]
    for name in _shown_metrics(run.options):
        sections.append((f"{METRICS[name][0]}, ms", _metric_rows(name, result, _percentiles(run.options))))
    return table("Serving benchmark result", sections)


def _metric_rows(name: str, result: dict[str, Any], percentiles: Sequence[float]) -> list[Row]:
    mean = f"{result[f'mean_{name}_ms']:.2f} ± {result[f'ci95_{name}_ms']:.2f}"
    rows = [(f"Mean {name.upper()} (± 95% confidence)", mean)]
    rows += [
        (f"{kind.capitalize()} {name.upper()}", f"{result[f'{kind}_{name}_ms']:.2f}") for kind in ("median", "std")
    ]
    names = [percentile_name(wanted) for wanted in percentiles]
    return rows + [(f"{which.upper()} {name.upper()}", f"{result[f'{which}_{name}_ms']:.2f}") for which in names]


def _as_share(value: float | None) -> str:
    return "not reported" if value is None else f"{value:.1%}"


def _warnings(run: Run, result: dict[str, Any]) -> list[str]:
    found = []
    errors = Counter(outcome.error for outcome in run.load.outcomes if outcome.error)
    for error, count in errors.most_common(MOST_ERRORS_SHOWN):
        found.append(f"{count} request(s) failed: {error}")
    hit_rate = result["prefix_cache_hit_rate"] or 0.0
    if hit_rate > FLATTERING_HIT_RATE:
        found.append(
            f"{hit_rate:.1%} of the prompt tokens came from the prefix cache: unseen prompts are slower. "
            "Run without --seed, or restart the server."
        )
    elif run.settings.seed is not None:
        found.append(
            "--seed was given: a second run with it sends the same prompts, which the server may have cached by then."
        )
    if run.load.client_cpu > BUSY_CLIENT:
        found.append(f"The client used {run.load.client_cpu:.0%} of a core: it may be what limits these figures.")
    if len(run.samples) < run.settings.dataset.num_prompts:
        found.append(f"The dataset had {len(run.samples)} usable prompts, fewer than --num-prompts.")
    return found


def _panels(load: Load) -> list[Panel]:
    flight = load.in_flight()
    tokens = load.tokens_by_second()
    latencies = []
    for name in ("ttft", "e2el"):
        values = sorted(value for outcome in load.completed for value in METRICS[name][1](outcome))
        shares = [100 * (rank + 1) / len(values) for rank in range(len(values))]
        latencies.append(Line(METRICS[name][0], [0.0, *values], [0.0, *shares]))
    in_flight = Line("", [at for at, _ in flight], [count for _, count in flight], steps=True)
    by_second = Line("", list(range(len(tokens))), tokens, steps=True)
    return [
        Panel("Requests in flight", "seconds", "requests", [in_flight]),
        Panel("Output tokens a second", "seconds", "tokens / s", [by_second]),
        Panel("Latency: share of requests that are faster", "seconds", "% of requests", latencies),
    ]


def _is_good(outcome: Outcome, limits: dict[str, float]) -> bool:
    return all(value * 1e3 <= limit for name, limit in limits.items() for value in METRICS[name][1](outcome))


def _shown_metrics(options: ServingReportOptions) -> list[str]:
    names = [name for name in options.percentile_metrics.split(",") if name]
    if unknown := [name for name in names if name not in METRICS]:
        raise ConfigError(f"--percentile-metrics knows {', '.join(METRICS)}, not '{unknown[0]}'.")
    return names


def _percentiles(options: ServingReportOptions) -> list[float]:
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


def _file_name(run: Run) -> str:
    arrivals = run.settings.arrivals
    concurrency = f"-concurrency{arrivals.max_concurrency}" if arrivals.max_concurrency else ""
    model = run.model.rstrip("/").split("/")[-1]
    label = run.options.label or run.settings.backend
    return f"{label}-{arrivals.request_rate}qps{concurrency}-{model}-{datetime.now():%Y%m%d-%H%M%S}.json"
