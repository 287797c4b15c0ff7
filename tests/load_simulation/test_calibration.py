"""What a server adds is found again from how long its clients waited: in simulated servers of known terms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.foundation.config import Config
from quire.models.spec import read_spec
from quire.planning.costmodel.measured_step_times import MeasuredStepTimes, ServerTerms, StepTerms
from quire.planning.costmodel.step_work import windows_of
from quire.planning.machine import this_machine
from quire.tools.bench.load import closed_loads
from quire.tools.simulation.calibration import server_terms, waits_of
from quire.tools.simulation.deployment import Deployment, Processor, deploy


def a_deployment(server: ServerTerms) -> Deployment:
    spec = read_spec("quire/builtin/quill")
    config = Config().with_values(model="quill", dtype="bfloat16", device="cpu")
    steps = StepTerms(points=((1, 1.5), (64, 15.0), (512, 90.0)), row_ms=0.05, chunk_ms=0.1, read_ms=7e-5,
                      score_ms=2e-5, error=0.1)  # fmt: skip
    windows = tuple(windows_of(spec).items())
    measured = MeasuredStepTimes("quill", spec.num_parameters, "bfloat16", "bfloat16", 2, windows, steps, 0.5, server)
    return replace(deploy(config, spec, Processor(2, this_machine())), measured=measured)


def test_loads_keep_to_the_settings_and_differ() -> None:
    for most, longest in ((1, 40), (8, 1_000), (256, 100_000)):
        loads = closed_loads(most, longest, seed=0)
        assert [load.open for load in loads] == [n for n in (1, 3, 8, 24) if n <= most]
        lengths = [pair for load in loads for pair in load.lengths]
        assert all(prompt > 0 and output > 0 and prompt + output < longest for prompt, output in lengths)
        assert len(set(lengths)) > len(lengths) / 2
    assert closed_loads(8, 1_000, seed=0) == closed_loads(8, 1_000, seed=0) != closed_loads(8, 1_000, seed=1)


@pytest.mark.parametrize(
    "known",
    [
        ServerTerms(request_ms=3.0, arrival_ms=2.0, step_ms=0.5, row_ms=0.1),
        ServerTerms(request_ms=0.0, arrival_ms=0.0, step_ms=0.0, row_ms=0.0),
    ],
)
def test_terms_of_a_server_are_found_again(known: ServerTerms) -> None:
    where, loads = a_deployment(known), closed_loads(8, 400, seed=0)
    found = server_terms(where, loads, [waits_of(where, known, load) for load in loads])
    for wanted, load in ((waits_of(where, known, load), load) for load in closed_loads(8, 400, seed=1)):
        predicted = waits_of(where, found, load)
        assert predicted.ttft == pytest.approx(wanted.ttft, rel=0.05)
        assert predicted.tpot == pytest.approx(wanted.tpot, rel=0.05)


def test_an_arrival_delays_the_next_step() -> None:
    """One request at a time: each waits for its own arrival, and decodes undisturbed."""
    load = closed_loads(64, 1_024, seed=0)[0]
    nothing = ServerTerms(request_ms=0.0, arrival_ms=0.0, step_ms=0.0, row_ms=0.0)
    without, with_arrivals = (
        waits_of(a_deployment(nothing), ServerTerms(0.0, ms, 0.0, 0.0), load) for ms in (0.0, 5.0)
    )
    assert with_arrivals.ttft == pytest.approx(without.ttft + 5.0)
    assert with_arrivals.tpot == pytest.approx(without.tpot)
