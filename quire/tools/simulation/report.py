"""A simulation for people, for programs and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from quire.tools.bench.report import PLOT_BUCKETS, Line, Panel, Row, rates, shares_line, svg, table
from quire.tools.simulation.deployment import Deployment, Processor
from quire.tools.simulation.engine import SimulatedRun
from quire.tools.simulation.figures import METRICS, Figures
from quire.tools.simulation.slo import Search, keeps_up
from quire.tools.simulation.trace import Trace

FULL = 0.97
"""Share of the KV cache in use at which it has no room for another prompt."""
NOTABLE = 0.02
"""Smallest share of the time that is worth a line."""


@dataclass(frozen=True)
class Simulation:
    """A simulation of a model, named as asked, and its result. `search` is None if no rate was searched."""

    name: str
    where: Deployment
    load: Trace
    run: SimulatedRun
    figures: Figures
    search: Search | None


def as_text(found: Simulation) -> str:
    parts = [*_head(found), found.figures.as_text(), *(f"reason: {line}" for line in reasons(found))]
    if found.search is not None:
        parts += ["", *_search_lines(found.search)]
    return "\n".join([*parts, *(f"note: {line}" for line in _notes(found.where))])


def as_json(found: Simulation) -> dict[str, Any]:
    """Plain data under stable names."""
    scheduler, where, search = found.where.config.scheduler, found.where, found.search
    return {
        "model": found.name,
        "device": where.device.name,
        "tensor_parallel_size": where.tp,
        "dtype": where.config.model.dtype,
        "kv_dtype": where.config.kv_dtype,
        "kv_cache_tokens": found.where.kv_tokens,
        "max_model_len": where.plan.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "request_rate": found.load.rate if found.load.seconds else "inf",
        **found.figures.as_json(),
        "reasons": reasons(found),
        "slo": None if search is None else _search_json(search),
    }


def picture(found: Simulation) -> str:
    """Load, throughput and latencies, and what each rate reached."""
    states, served = found.run.occupancy, found.run.served
    at = [state.time for state in states]
    begin = min(each.sent for each in served)
    tokens = [(time - begin, 1.0) for each in served for time in each.times]
    by_second = rates(tokens, found.run.seconds, PLOT_BUCKETS)
    panels = [
        Panel("Requests", "seconds", "requests", [
            Line("running", at, [state.running for state in states], steps=True),
            Line("waiting", at, [state.waiting for state in states], steps=True),
        ]),
        Panel("Output tokens a second", "seconds", "tokens / s", [Line("", *by_second, steps=True)]),
        Panel("KV cache in use", "seconds", "%", [Line("", at, [100 * s.kv_share for s in states], steps=True)]),
    ]  # fmt: skip
    lines = [
        shares_line(METRICS[name][0], [value for each in served for value in METRICS[name][1](each)])
        for name in ("ttft", "e2el")
    ]
    panels.append(Panel("Latency: share of requests that are faster", "seconds", "% of requests", lines))
    if found.search is not None:
        panels.append(_rates_panel(found.search))
    return svg(panels)


def reasons(found: Simulation) -> list[str]:
    """The lines that say what limited the load."""
    most, states, figures = found.where.config.scheduler.max_num_seqs, found.run.occupancy, found.figures
    seconds = (states[-1].time - states[0].time) or 1.0
    lasted = [(before, after.time - before.time) for before, after in pairwise(states)]
    waits = [(state, time / seconds) for state, time in lasted if state.waiting]
    no_slot = sum(share for state, share in waits if state.running == most)
    no_blocks = sum(share for state, share in waits if state.running != most and state.kv_share >= FULL)
    no_time = sum(share for _, share in waits) - no_slot - no_blocks
    lines = []
    if figures.preemptions:
        lines.append(
            f"{figures.preemptions:,} preemptions: the KV cache, {found.where.kv_tokens:,} tokens, was full. Lower "
            "--max-num-seqs, or give --kv-cache-dtype fp8 or more memory"
        )
    if no_blocks > NOTABLE:
        lines.append(f"requests waited for room in the KV cache {no_blocks:.0%} of the time")
    if no_slot > NOTABLE:
        lines.append(f"requests waited {no_slot:.0%} of the time while all --max-num-seqs {most} were running")
    if no_time > NOTABLE:
        lines.append(
            f"prompts waited {no_time:.0%} of the time until steps had time for them beside streams, as "
            "--performance-mode says"
        )
    if found.load.seconds and found.load.concurrency is None and not keeps_up(found.run.served):
        lines.append("open requests grew: more came than are served, or --num-prompts are too few to tell")
    if not lines:
        lines.append(
            f"nothing held requests back: {figures.running:,.1f} of up to {most} ran at a time, and the device "
            f"was idle {max(0.0, 1 - figures.busy):.0%} of the time"
        )
    return lines


def _head(found: Simulation) -> list[str]:
    where, load = found.where, found.load
    spec, scheduler = where.spec, where.config.scheduler
    count = len(load.requests)
    prompt, output = (sum(getattr(each, name) for each in load.requests) / count for name in ("prompt", "output"))
    many = "" if where.tp == 1 else f"{where.tp} × "
    when = f"at {load.rate:,.4g} requests/s" if load.seconds else "all at once"
    if load.concurrency is not None:
        when += f", at most {load.concurrency} at a time"
    return [
        f"{found.name}: {spec.architecture}, {spec.num_parameters / 1e9:,.3g}B parameters on {many}{where.device.name}",
        f"{where.config.model.dtype}, KV cache of {found.where.kv_tokens:,} tokens ({where.config.kv_dtype}): "
        f"{where.plan.reason}",
        f"up to {scheduler.max_num_seqs} sequences and {scheduler.max_num_batched_tokens:,} tokens a step, "
        f"{scheduler.performance_mode or 'balanced'}",
        f"load: {count:,} requests of {prompt:,.0f} + {output:,.0f} tokens on average, {when}",
    ]


def _search_lines(search: Search) -> list[str]:
    wanted = " ".join(f"{name}={limit:g}" for name, limit in search.limits.items())
    best = "none" if search.best is None else f"{search.best.rate:,.4g} requests/s"
    rows: list[Row] = [
        (f"{each.rate:,.4g} requests/s", f"{each.attainment:.2%} within" + ("" if each.sustained else ", grows"))
        for each in search.tried
    ]
    return [
        table("Rates that were tried", [("", rows)]),
        f"highest rate at which {search.wanted:.4g} of the requests keep {wanted}: {best}",
        f"reason: {search.reason()}",
    ]


def _search_json(search: Search) -> dict[str, Any]:
    return {
        "limits_ms": search.limits,
        "wanted": search.wanted,
        "request_rate": None if search.best is None else search.best.rate,
        "attainment": None if search.best is None else search.best.attainment,
        "reason": search.reason(),
        "tried": [
            {"request_rate": t.rate, "attainment": t.attainment, "sustained": t.sustained, "broken": t.broken}
            for t in search.tried
        ],
    }


def _notes(where: Deployment) -> Sequence[str]:
    if isinstance(where.device, Processor):
        if where.measured is None:
            return ["cpu: a guess from its cores, easily a factor of two off; --calibrate times steps here."]
        return [f"cpu: steps as timed here; half of them are within {where.measured.steps.error:.1%} of their terms."]
    notes = []
    if not where.device.is_measured:
        notes.append(f"{where.device.name}: published figures, reached to the shares that were measured on an H200.")
    if where.tp > 1:
        notes.append("several GPUs for one model: an estimate; Quire does not serve that yet.")
    return notes


def _rates_panel(search: Search) -> Panel:
    rates = [each.rate for each in search.tried]
    shares = [100 * each.attainment for each in search.tried]
    wanted = Line("wanted", [0.0, rates[-1]], [100 * search.wanted] * 2)
    return Panel(
        "Requests within the limits", "requests a second", "% of requests", [Line("kept", rates, shares), wanted]
    )
