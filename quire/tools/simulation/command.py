"""`quire simulate`: from options to figures that are printed and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from quire.foundation.config import Config
from quire.foundation.config.model import ModelConfig
from quire.models.spec import ModelSpec, on_a_gpu, spec_of
from quire.planning.costmodel.measured_step_times import MeasuredStepTimes, read_step_times
from quire.tools.bench.report import write_json, write_text
from quire.tools.bench.serving_figures import ServingReportOptions, percentiles_of
from quire.tools.simulation.calibration import calibrate
from quire.tools.simulation.deployment import Deployment, deploy, device_called, with_drafts
from quire.tools.simulation.engine import SimulatedRun, simulate
from quire.tools.simulation.figures import figures
from quire.tools.simulation.load import asked_load, find_model, timed_load
from quire.tools.simulation.options import SimulateOptions
from quire.tools.simulation.report import Simulation, as_json, as_text, picture
from quire.tools.simulation.slo import read_limits, search
from quire.tools.simulation.trace import Trace


def run(options: SimulateOptions) -> int:
    """Simulate, print and write; returns the exit code: 0, or 1 if the limits of --slo are not kept. Raises
    ModelNotFoundError, CheckpointError, ConfigError or MemoryBudgetError if the model cannot be deployed as asked, and
    QuireError if steps cannot be timed."""
    limits = {} if options.slo is None else read_limits(options.slo)
    percentiles = percentiles_of(ServingReportOptions(metric_percentiles=options.metric_percentiles))
    found = _simulated(options, limits, percentiles)
    print(as_text(found))
    if options.json is not None:
        write_json(options.json, as_json(found))
    if options.picture is not None:
        write_text(options.picture, picture(found))
    if found.search is None:
        return 0
    good = found.search.best is not None and found.figures.goodput_share >= options.slo_attainment / 100
    return 0 if good else 1


def _simulated(options: SimulateOptions, limits: dict[str, float], percentiles: Sequence[float]) -> Simulation:
    assert options.model is not None
    directory = find_model(options.model)
    spec = spec_of(ModelConfig(model=options.model, quantization=options.serving.quantization), directory)
    where = _deployed(options, spec, directory)
    load = asked_load(options, spec, directory)
    searched = None
    if limits:
        timed = timed_load(options, spec, directory)
        at_once = _run(where, timed.at_once())
        most = len(timed.requests) / at_once.seconds  # roughly what the device can take
        searched = search(lambda rate: _run(where, timed.at_rate(rate)), most, limits, options.slo_attainment / 100)
        if not load.seconds and (shown := searched.best or searched.over) is not None:
            load = timed.at_rate(shown.rate)
    done = _run(where, load)
    return Simulation(options.model, where, load, done, figures(done, limits, percentiles), searched)


def _run(where: Deployment, load: Trace) -> SimulatedRun:
    return simulate(where.config, where.spec, where.simulated(server=True), load)


def _deployed(options: SimulateOptions, spec: ModelSpec, directory: Path) -> Deployment:
    device = device_called(options.gpu, options.serving.cpu_threads)
    spec = spec if options.gpu == "cpu" else on_a_gpu(spec)
    config = Config().with_values(model=str(options.model), **asdict(options.serving))
    where = deploy(with_drafts(config, spec, directory, device), spec, device, options.serving.tensor_parallel_size)
    measured = _step_times(options, config.with_values(model=str(directory), device="cpu"))
    if measured is None:
        return where
    measured.check(where.spec, where.config.model.dtype, where.config.kv_dtype)
    return replace(where, measured=measured)


def _step_times(options: SimulateOptions, config: Config) -> MeasuredStepTimes | None:
    """Step times that are measured now, or read from a file; None if neither is asked for."""
    if not options.calibrate:
        return None if options.step_times is None else read_step_times(options.step_times)
    found = msgspec.structs.replace(calibrate(config), model=str(options.model))
    if options.step_times is not None:
        write_text(options.step_times, msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    return found
