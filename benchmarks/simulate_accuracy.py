"""`quire simulate` beside a real server of the same model, on this machine's processor.

    python benchmarks/simulate_accuracy.py [--model quill] [--requests 200] [--share 0.6] [--runs 3] [--trace FILE]
        [--step-times FILE] [--json FILE]

First steps are timed, as `quire simulate --gpu cpu --calibrate` does (or read from a file that it has written). Then
one trace is simulated, and sent to `quire serve` by the client of `quire bench serve`, --runs times with prompts that
the server has not seen. Without --trace the requests have 128 + 48 tokens, each length drawn within a half of it, and
come as a Poisson process at --share of the rate that the simulation takes when all come at once.

Printed are TTFT and TPOT, p50 and p99, of the median run and of the simulation. The exit code is 0 where p50 is within
15% and p99 within 30%. On a machine that does other things too, both the timed steps and the runs are other ones than
the simulation's, and the comparison says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from quire.foundation.config import Config
from quire.models.spec import read_spec
from quire.planning.costmodel.measured_step_times import MeasuredStepTimes, read_step_times
from quire.planning.machine import this_machine
from quire.tools.bench.client import Outcome
from quire.tools.bench.datasets import Sample
from quire.tools.bench.load import ArrivalOptions, arrival_times
from quire.tools.bench.report import percentile
from quire.tools.bench.server_times import asked, served
from quire.tools.simulation.calibration import calibrate
from quire.tools.simulation.deployment import Deployment, Processor, deploy
from quire.tools.simulation.engine import Served, simulate
from quire.tools.simulation.load import find_model
from quire.tools.simulation.trace import Trace, TraceFileOptions, TraceRequest, read_trace

PROMPT, OUTPUT, AROUND = 128, 48, 0.5
BOUNDS = {50: 0.15, 99: 0.30}
Percentiles = dict[str, float]


def main() -> None:
    arguments = _arguments()
    config = Config().with_values(model=arguments.model, device="cpu", cpu_threads=arguments.cpu_threads)
    measured = calibrate(config) if arguments.step_times is None else read_step_times(arguments.step_times)
    print(f"steps: half of them within {measured.steps.error:.1%} of their terms; a server adds {measured.server}")
    where = _deployed(config, measured)
    trace = _trace(arguments, where)
    simulated = _of_simulation(simulate(where.config, where.spec, where.simulated(server=True), trace).served)
    with tempfile.TemporaryDirectory(prefix="quire-") as directory, served(config, Path(directory)) as port:
        _run(where, port, Trace(trace.requests[:8]), seed=10_000)  # what is made once, is made here
        runs = [_run(where, port, trace, seed) for seed in range(arguments.runs)]
    real = {name: median(run[name] for run in runs) for name in simulated}
    print(f"{len(trace.requests)} requests at {trace.rate:.3g} requests/s, median of {len(runs)} runs")
    kept = _compared(real, simulated, runs)
    if arguments.json is not None:
        result = {"requests": len(trace.requests), "request_rate": trace.rate, "kept": kept}
        arguments.json.write_text(json.dumps(result | {"simulated": simulated, "real": real, "runs": runs}, indent=2))
    raise SystemExit(0 if kept else 1)


def _deployed(config: Config, measured: MeasuredStepTimes) -> Deployment:
    spec = read_spec(find_model(config.model.model))
    cores = config.device.cpu_threads or len(os.sched_getaffinity(0))
    where = deploy(config, spec, Processor(cores, this_machine()))
    measured.check(spec, where.config.model.dtype, where.config.kv_dtype)
    return replace(where, measured=measured)


def _trace(arguments: argparse.Namespace, where: Deployment) -> Trace:
    """The load, without tokens: each run has its own."""
    draw = random.Random(0)
    if arguments.trace is not None:
        options = TraceFileOptions(arguments.trace)
        return read_trace(options, ArrivalOptions(), arguments.requests, _no_tokens, draw)

    def around(length: int) -> int:
        return draw.randint(round(length * (1 - AROUND)), round(length * (1 + AROUND)))

    requests = [TraceRequest(0.0, around(PROMPT), around(OUTPUT)) for _ in range(arguments.requests)]
    at_once = simulate(where.config, where.spec, where.simulated(server=True), Trace(tuple(requests)))
    arrivals = ArrivalOptions(request_rate=arguments.share * len(requests) / at_once.seconds)
    times = arrival_times(arrivals, len(requests), draw)
    return Trace(tuple(replace(each, arrival=time) for each, time in zip(requests, times, strict=True)))


def _no_tokens() -> object:
    raise SystemExit("This trace has prompts: give one with lengths.")


def _run(where: Deployment, port: int, trace: Trace, seed: int) -> Percentiles:
    prompts = trace.token_ids(where.spec.vocab_size, seed)
    samples = [Sample(ids, request.output) for ids, request in zip(prompts, trace.requests, strict=True)]
    name = where.config.model.model
    return _of_outcomes(asked(name, port, samples, [request.arrival for request in trace.requests]))


def _of_outcomes(outcomes: list[Outcome]) -> Percentiles:
    return _percentiles([o.ttft or 0.0 for o in outcomes], [o.tpot for o in outcomes if o.tpot is not None])


def _of_simulation(requests: list[Served]) -> Percentiles:
    return _percentiles([each.ttft for each in requests], [each.tpot for each in requests if each.tpot is not None])


def _percentiles(ttft: list[float], tpot: list[float]) -> Percentiles:
    """In milliseconds."""
    times = {"TTFT": sorted(ttft), "TPOT": sorted(tpot)}
    return {f"{name} p{p}": 1e3 * percentile(values, p) for name, values in times.items() for p in BOUNDS}


def _compared(real: Percentiles, simulated: Percentiles, runs: list[Percentiles]) -> bool:
    """Print both; whether all are within their bounds."""
    kept = True
    print("| | real, ms | of the runs | simulated, ms | ratio | within |\n| --- | --- | --- | --- | --- | --- |")
    for name, ms in real.items():
        bound, ratio = BOUNDS[int(name.rpartition("p")[2])], simulated[name] / ms
        inside = abs(ratio - 1) <= bound
        kept &= inside
        spread = f"{min(run[name] for run in runs):.2f} to {max(run[name] for run in runs):.2f}"
        print(f"| {name} | {ms:.2f} | {spread} | {simulated[name]:.2f} | {ratio:.3f} | "
              f"{bound:.0%}: {'yes' if inside else 'no'} |")  # fmt: skip
    return kept


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quill")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.6, help="of the highest rate")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trace", help="a trace with times and lengths")
    parser.add_argument("--step-times", help="file that quire simulate --calibrate has written")
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
