"""Terms of steps that were timed: found again in steps of known cost, also amid stalls; files are read or refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quire.errors import ConfigError
from quire.models.spec import read_spec
from quire.planning.costmodel.cards import CPU_SHARES
from quire.planning.costmodel.hardware import cpu
from quire.planning.costmodel.measured_step_times import (
    MeasuredStepTime,
    MeasuredStepTimes,
    ServerTerms,
    StepTerms,
    TimedStep,
    as_long_as,
    fitted,
    read_step_times,
    windows_of,
)
from quire.planning.costmodel.step_time import StepTime
from quire.tools.sizing.measured_rows import DIRECTORY

SPEC = read_spec(DIRECTORY / "qwen3-0.6b")
KNOWN = StepTime(SPEC, "bfloat16", cpu(4), "bfloat16", CPU_SHARES)
WINDOWS = {None: len(SPEC.layers)}


def a_step(draw: random.Random) -> TimedStep:
    """Rows that decode, a prompt, several prompts, or both."""
    rows, chunks = draw.choice([(1, 0), (4, 0), (16, 0), (40, 0), (0, 1), (0, 1), (0, 3), (6, 1), (20, 2)])
    counts = [1] * rows + [draw.choice((8, 16, 50, 100, 180, 250)) for _ in range(chunks)]
    before = [draw.choice((10, 200, 1_000)) for _ in range(rows)] + [draw.choice((0, 0, 500)) for _ in range(chunks)]
    ms = KNOWN(np.array(counts), np.array(before), rows + chunks)
    return TimedStep(tuple(counts), tuple(before), rows + chunks, ms)


def error(predict: MeasuredStepTime, step: TimedStep) -> float:
    return abs(predict(np.array(step.counts), np.array(step.before), step.sampled) / step.ms - 1)


@pytest.mark.parametrize("stalls", [0.0, 0.15])
def test_terms_predict_steps_that_were_not_timed(stalls: float) -> None:
    draw = random.Random(0)
    steps = [a_step(draw) for _ in range(1_500)]
    steps = [replace(each, ms=each.ms * 20) if draw.random() < stalls else each for each in steps]
    predict = MeasuredStepTime(fitted(steps, SPEC), windows_of(SPEC))
    errors = sorted(error(predict, a_step(draw)) for _ in range(300))
    assert errors[150] < 0.02
    assert errors[-1] < 0.15


def test_terms_grow_until_they_sum_up_to_what_a_load_took() -> None:
    draw = random.Random(0)
    usual = fitted([a_step(draw) for _ in range(500)], SPEC)
    load = [replace(each, ms=each.ms * draw.choice((1, 1, 1, 3))) for each in (a_step(draw) for _ in range(500))]
    predict = MeasuredStepTime(as_long_as(usual, load, SPEC), windows_of(SPEC))
    predicted = sum(predict(np.array(each.counts), np.array(each.before), each.sampled) for each in load)
    assert predicted == pytest.approx(sum(each.ms for each in load), rel=1e-6)
    assert predict.decode(1, 100) > 1.2 * MeasuredStepTime(usual, windows_of(SPEC)).decode(1, 100)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fitted([a_step(random.Random(0))] * 50, SPEC)


def terms(**changed: float) -> StepTerms:
    flat = StepTerms(points=((1, 2.0), (8, 3.0)), row_ms=0.0, chunk_ms=0.0, read_ms=0.0, score_ms=0.0, error=0.0)
    return msgspec.structs.replace(flat, **changed)


def test_a_curve_is_straight_between_its_points_and_goes_on_behind_the_last() -> None:
    predict = MeasuredStepTime(terms(), WINDOWS)
    assert [predict.decode(rows, 5) for rows in (1, 8, 15)] == pytest.approx([2.0, 3.0, 4.0])


def test_rows_read_as_far_back_as_a_layer_looks() -> None:
    one, other = {None: 1}, {None: 1, 100: 2}
    assert MeasuredStepTime(terms(read_ms=0.01), one).decode(1, 299) == pytest.approx(2 + 0.01 * 300)
    assert MeasuredStepTime(terms(read_ms=0.01), other).decode(1, 299) == pytest.approx(2 + 0.01 * (300 + 2 * 100))
    chunk = MeasuredStepTime(terms(score_ms=0.01, chunk_ms=0.5), one)
    assert chunk(np.array([8]), np.array([100]), 0) == pytest.approx(3 + 0.5 + 0.01 * 8 * 104)


def measured() -> MeasuredStepTimes:
    server = ServerTerms(request_ms=4.0, arrival_ms=0.75, step_ms=0.25, row_ms=0.5)
    windows = tuple(windows_of(SPEC).items())
    return MeasuredStepTimes(
        "a model", SPEC.num_parameters, "bfloat16", "bfloat16", 2, windows, terms(row_ms=0.125), 1.0, server
    )


def test_a_server_adds_to_requests_steps_and_streams() -> None:
    found = measured()
    assert (found.request_ms(server=False), found.request_ms(server=True)) == (1.0, 5.0)
    assert (found.arrival_ms(server=False), found.arrival_ms(server=True)) == (0.0, 0.75)
    alone, served = (found.step_time(server=server).decode(8, 10) for server in (False, True))
    assert alone == pytest.approx(3 + 8 * 0.125)
    assert served == pytest.approx(alone + 0.25 + 8 * 0.5)


def test_a_file_is_read_as_it_was_written_and_anything_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_bytes(msgspec.json.encode(measured()))
    assert read_step_times(str(tmp_path / "steps.json")) == measured()
    for text in ("{}", "[", '{"model": 3}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ConfigError, match=r"--step-times .*other\.json"):
            read_step_times(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match="nothing"):
        read_step_times(str(tmp_path / "nothing.json"))


def test_times_of_another_model_are_refused() -> None:
    measured().check(SPEC, "bfloat16", "bfloat16")
    for spec, dtype, kv_dtype in (
        (SPEC, "float32", "bfloat16"),
        (SPEC, "bfloat16", "int8"),
        (read_spec(DIRECTORY / "llama-3.1-8b"), "bfloat16", "bfloat16"),
    ):
        with pytest.raises(ConfigError, match="a model"):
            measured().check(spec, dtype, kv_dtype)
