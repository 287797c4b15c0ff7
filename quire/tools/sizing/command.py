"""`quire plan`: from options to a plan that is printed and written."""

from __future__ import annotations

import random
from statistics import fmean
from typing import get_args

from quire.errors import ConfigError
from quire.models.spec import ModelSpec, read_spec
from quire.tools.bench.datasets import Tokens
from quire.tools.bench.load import ArrivalOptions
from quire.tools.bench.report import write_json, write_text
from quire.tools.simulation.deployment import FormatName
from quire.tools.simulation.engine import simulate
from quire.tools.simulation.figures import Figures, figures
from quire.tools.simulation.load import find_model
from quire.tools.simulation.trace import Trace, TraceFileOptions, read_trace
from quire.tools.sizing.measured_rows import checked, measured_rows
from quire.tools.sizing.options import PlanOptions, read_prices
from quire.tools.sizing.report import SizingPlan, as_json, as_text, check_text, picture
from quire.tools.sizing.steady_state import Traffic
from quire.tools.sizing.survey import Candidate, MemoryRow, devices, memory_row, survey
from quire.tools.sizing.texts import plan_texts, spec_of_texts

MAX_TRACED = 1_000
"""Requests of a trace that give the lengths and are simulated."""


def run(options: PlanOptions) -> int:
    """Plan, print and write; returns the exit code: 0, or 1 if nothing keeps the targets. Raises ModelNotFoundError,
    CheckpointError or ConfigError if the model or a file cannot be used, or an option is wrong."""
    if options.check:
        print(check_text(checked(measured_rows())))
        return 0
    assert options.model is not None
    if (of_texts := spec_of_texts(options)) is not None:
        return plan_texts(options, of_texts)
    spec = read_spec(find_model(options.model))
    trace = _trace(options)
    traffic = Traffic(options.input_len, options.output_len) if trace is None else _traffic(trace)
    if traffic.longest > spec.max_model_len:
        raise ConfigError(
            f"Sequences of {traffic.longest:,} tokens are longer than the {spec.max_model_len:,} that the model was "
            "made for.",
            param="input_len",
        )
    found = survey(options, spec, traffic, read_prices(options.prices))
    simulated = None if trace is None else _simulated(found[0], trace)
    rate = options.rate or (None if trace is None or not trace.seconds else trace.rate)
    plan = SizingPlan(options.model, spec, traffic, rate, tuple(_memory(options, spec)), tuple(found), simulated)
    print(as_text(plan))
    if options.json is not None:
        write_json(options.json, as_json(plan))
    if options.picture is not None:
        write_text(options.picture, picture(found[0]))
    return 0 if found[0].best is not None else 1


def _trace(options: PlanOptions) -> Trace | None:
    if options.trace is None:
        return None

    def no_tokens() -> Tokens:
        raise ConfigError("A plan reads traces with lengths only; quire simulate reads prompts.", param="trace")

    return read_trace(TraceFileOptions(options.trace), ArrivalOptions(), MAX_TRACED, no_tokens, random.Random(0))


def _traffic(trace: Trace) -> Traffic:
    """Traffic with the mean lengths of the trace, which throughput depends on."""
    prompts, outputs = ([getattr(each, name) for each in trace.requests] for name in ("prompt", "output"))
    most = max(map(sum, zip(prompts, outputs, strict=True)))
    return Traffic(round(fmean(prompts)), max(1, round(fmean(outputs))), most)


def _simulated(best: Candidate, trace: Trace) -> Figures | None:
    """The figures of the trace on the best candidate, whose sequences may be as long as the longest one."""
    if best.best is None or best.deployment is None:
        return None
    where = best.deployment
    return figures(simulate(where.config, where.spec, where.simulated(server=True), trace))


def _memory(options: PlanOptions, spec: ModelSpec) -> list[MemoryRow]:
    formats: tuple[FormatName, ...] = get_args(FormatName)
    wanted = [name for name in formats if name in options.formats.split(",")]
    own = wanted if spec.quantization is None else wanted[:1]
    return [memory_row(options, spec, device, 1, form) for device in devices(options) for form in own]
