"""How `quire bench serve` shows a run: a table, warnings about figures that flatter, a result file, a plot."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.tools.bench.client import GENERATING
from quire.tools.bench.load import Load
from quire.tools.bench.report import (
    PLOT_BUCKETS,
    Line,
    Panel,
    Row,
    percentile_name,
    shares_line,
    svg,
    table,
    write_json,
    write_text,
)
from quire.tools.bench.serving_figures import METRICS, Run, figures, percentiles_of, shown_metrics

FLATTERING_HIT_RATE = 0.01
BUSY_CLIENT = 0.8
MAX_ERRORS_SHOWN = 5


def publish(run: Run) -> None:
    """Print the table and warnings, and write the files that were asked for. Raises ConfigError if one cannot be."""
    result = figures(run)
    print(_table(run, result))
    for warning in _warnings(run, result):
        print(f"quire: warning: {warning}", file=sys.stderr)
    if run.options.plot is not None:
        write_text(run.options.plot, svg(_panels(run.load)))
    if run.options.save_result or run.options.append_result:
        file = Path(run.options.result_dir or ".") / (run.options.result_filename or _file_name(run))
        write_json(file, result, append=run.options.append_result)
        print(f"Result written to {file}")


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
        ("Peak output token throughput (tok/s)", f"{result['max_output_tokens_per_s']:.2f}"),
        ("Peak concurrent requests", f"{result['max_concurrent_requests']}"),
    ]
    if result["request_goodput"] is not None:
        rows.insert(6, ("Request goodput (req/s)", f"{result['request_goodput']:.2f}"))
    fairness: list[Row] = [
        ("Seed" if run.settings.seed is not None else "Seed (new for this run)", f"{run.seed}"),
        ("Prefix cache hits", _as_share(result["prefix_cache_hit_rate"])),
        ("Draft acceptance", _as_share(result["spec_decode_acceptance_rate"])),
        ("Client CPU", _as_share(result["client_cpu"])),
    ]
    sections: list[tuple[str, list[Row]]] = [("", rows), ("What to know about these figures", fairness)]
    for name in shown_metrics(run.options) if result["completed"] else ():
        sections.append((f"{METRICS[name][0]}, ms", _metric_rows(name, result, percentiles_of(run.options))))
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
    for error, count in errors.most_common(MAX_ERRORS_SHOWN):
        found.append(f"{count} request(s) failed: {error}")
    generates = run.settings.backend in GENERATING
    if generates and (empty := sum(outcome.ttft is None for outcome in run.load.completed)):
        advice = "" if run.settings.ignore_eos else " If the model ended at once, --ignore-eos makes it go on."
        found.append(f"{empty} answer(s) had no text: they are completed, without a time to first token.{advice}")
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
    tokens = load.token_rates(PLOT_BUCKETS)
    latencies = [
        shares_line(METRICS[name][0], [value for outcome in load.completed for value in METRICS[name][1](outcome)])
        for name in ("ttft", "e2el")
    ]
    in_flight = Line("", [at for at, _ in flight], [count for _, count in flight], steps=True)
    by_second = Line("", *tokens, steps=True)
    return [
        Panel("Requests in flight", "seconds", "requests", [in_flight]),
        Panel("Output tokens a second", "seconds", "tokens / s", [by_second]),
        Panel("Latency: share of requests that are faster", "seconds", "% of requests", latencies),
    ]


def _file_name(run: Run) -> str:
    arrivals = run.settings.arrivals
    concurrency = f"-concurrency{arrivals.max_concurrency}" if arrivals.max_concurrency else ""
    model = run.model.rstrip("/").split("/")[-1]
    label = run.options.label or run.settings.backend
    return f"{label}-{arrivals.request_rate}qps{concurrency}-{model}-{datetime.now():%Y%m%d-%H%M%S}.json"
