"""Times this machine for simulations of it (`quire simulate --calibrate`): the engine's steps, then what a server adds.

A server and its client run on the same cores as the engine, and what they add shows only under load. So a real server
gets loads of several sizes, the same loads are simulated, and the server's terms are fitted until simulated requests
wait as long as real ones: by Gauss-Newton steps on relative differences, with terms that are not negative.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import mean, median

import msgspec
import numpy as np

from quire.foundation.config import Config
from quire.planning.auto_config import resolve
from quire.planning.costmodel.measured_step_times import FloatArray, MeasuredStepTimes, ServerTerms, non_negative
from quire.planning.costmodel.step_work import windows_of
from quire.planning.machine import this_machine
from quire.tools.bench.datasets import Sample
from quire.tools.bench.load import ClosedLoad, closed_loads
from quire.tools.bench.server_times import asked, served
from quire.tools.simulation.deployment import Deployment, Processor, deploy
from quire.tools.simulation.engine import simulate
from quire.tools.simulation.trace import Trace, TraceRequest

FIRST_GUESS = ServerTerms(request_ms=4.0, arrival_ms=1.0, step_ms=0.3, row_ms=0.05)
RUNS = 3
"""How often each load runs on the server; the median counts."""
ROUNDS = 4
"""Steps of the fit. After three, terms move by less than a percent."""
_NUDGE = 0.25
"""Share by which a term is moved to see its effect."""


@dataclass(frozen=True)
class Waits:
    """How long requests of a load waited: mean TTFT and TPOT in milliseconds."""

    ttft: float
    tpot: float


def calibrate(config: Config) -> MeasuredStepTimes:
    """Time an engine and a server of the model, with settings as asked for a processor; this takes a minute for a small
    model. Raises SetupError if the model cannot be served, and QuireError if steps or a server failed."""
    resolved = resolve(config)
    own, spec = resolved.config, resolved.spec
    engine = importlib.import_module("quire.tools.bench.step_times").measure_engine(resolved)  # loads torch
    threads = own.device.cpu_threads or len(os.sched_getaffinity(0))
    found = MeasuredStepTimes(
        own.model.served_model_name[0], spec.num_parameters, own.model.dtype, own.kv_dtype, threads,
        tuple(windows_of(spec).items()), engine.steps, engine.request_ms, FIRST_GUESS,
    )  # fmt: skip
    where = replace(deploy(own, spec, Processor(threads, this_machine())), measured=found)
    most, longest = own.scheduler.max_num_seqs, own.model.max_model_len
    assert most and isinstance(longest, int), "settings are resolved"
    loads, seeds = closed_loads(most, longest, seed=0), count()
    with tempfile.TemporaryDirectory(prefix="quire-") as directory, served(config, Path(directory)) as port:
        runs = [[_waited(where, port, load, next(seeds)) for load in loads] for _ in range(1 + RUNS)]
    waited = _medians(runs[1:])  # the first opened connections, and ran code for the first time
    return msgspec.structs.replace(found, server=server_terms(where, loads, waited))


def server_terms(where: Deployment, loads: Sequence[ClosedLoad], waited: Sequence[Waits]) -> ServerTerms:
    """The terms with which simulated requests wait as long as real ones waited, for loads from few requests at a time
    to many. `where` has the engine's own measured times."""
    names, wanted, terms = ServerTerms.__struct_fields__, _flat(waited), FIRST_GUESS

    def predict(terms: ServerTerms) -> FloatArray:
        return _flat([waits_of(where, terms, load) for load in loads])

    for _ in range(ROUNDS):
        predicted, slopes = predict(terms), []
        values = np.array([getattr(terms, name) for name in names])
        for name, value in zip(names, values, strict=True):
            nudge = _NUDGE * max(value, 0.1 * getattr(FIRST_GUESS, name))
            slopes.append((predict(msgspec.structs.replace(terms, **{name: value + nudge})) - predicted) / nudge)
        slope = np.array(slopes).T
        rest = wanted - predicted + slope @ values
        terms = ServerTerms(*non_negative(slope / wanted[:, None], rest / wanted).tolist())
    return terms


def _flat(waited: Sequence[Waits]) -> FloatArray:
    return np.array([ms for waits in waited for ms in (waits.ttft, waits.tpot)])


def _medians(runs: Sequence[Sequence[Waits]]) -> list[Waits]:
    return [Waits(median(w.ttft for w in load), median(w.tpot for w in load)) for load in zip(*runs, strict=True)]


def _waited(where: Deployment, port: int, load: ClosedLoad, seed: int) -> Waits:
    prompts = _trace(load).token_ids(where.spec.vocab_size, seed)
    samples = [Sample(ids, output) for ids, (_, output) in zip(prompts, load.lengths, strict=True)]
    outcomes = asked(where.config.model.served_model_name[0], port, samples, [0.0] * len(samples), load.open)
    return _waits([each.ttft or 0.0 for each in outcomes], [each.tpot for each in outcomes])


def waits_of(where: Deployment, terms: ServerTerms, load: ClosedLoad) -> Waits:
    """How long requests of a load wait in a simulation with these terms."""
    assert where.measured is not None
    device = replace(where, measured=msgspec.structs.replace(where.measured, server=terms)).simulated(server=True)
    done = simulate(where.config, where.spec, device, _trace(load)).served
    return _waits([each.ttft for each in done], [each.tpot for each in done])


def _trace(load: ClosedLoad) -> Trace:
    return Trace(tuple(TraceRequest(0.0, *lengths) for lengths in load.lengths), load.open)


def _waits(ttft: Sequence[float], tpot: Sequence[float | None]) -> Waits:
    return Waits(1e3 * mean(ttft), 1e3 * mean(each for each in tpot if each is not None))
