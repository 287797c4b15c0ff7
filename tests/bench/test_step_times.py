"""Steps that are timed are those that ran, and what they took is found again: on a device of known cost."""

from __future__ import annotations

import numpy as np
import pytest

from quire.engine.build import build_model_runtime_info
from quire.engine.inprocess import InProcessClient
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import DeviceLimits
from quire.models.spec import read_spec
from quire.planning.costmodel.cards import CPU_SHARES
from quire.planning.costmodel.hardware import cpu
from quire.planning.costmodel.measured_step_times import MeasuredStepTime, TimedStep
from quire.planning.costmodel.step_time import StepTime
from quire.planning.costmodel.step_work import windows_of
from quire.runtime.executor.simulated import SimulatedExecutor, VirtualClock
from quire.sampling_params import SamplingParams
from quire.tools.bench.step_times import LONG, StepRecorder, engine_terms, waves
from quire.tools.sizing.measured_rows import DIRECTORY

SPEC = read_spec(DIRECTORY / "qwen3-0.6b")
KNOWN = StepTime(SPEC, "bfloat16", cpu(4), "bfloat16", CPU_SHARES)
CONFIG = Config().with_values(
    model="m", device="cpu", dtype="bfloat16", max_num_seqs=32, max_num_batched_tokens=256, max_model_len=2_048
)


def device(clock: VirtualClock) -> SimulatedExecutor:
    return SimulatedExecutor(DeviceLimits(32 * 128, SPEC.vocab_size), 32, KNOWN, clock)


def test_each_step_is_recorded_with_its_rows_and_its_time() -> None:
    clock = VirtualClock()
    recorder = StepRecorder(device(clock), 32, clock)
    client = InProcessClient(CONFIG, recorder, clock, build_model_runtime_info(CONFIG, SPEC))
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
    client.send(Add(1, list(range(300)), 300, params, [], 0, clock.now()))
    while client.counts()["running"] + client.counts()["waiting"] or not recorder.steps:
        client.receive(0.0)
    wanted = [((256,), (0,), 0), ((44,), (256,), 1), ((1,), (300,), 1), ((1,), (301,), 1)]
    assert recorder.steps == [
        TimedStep(counts, before, sampled, pytest.approx(KNOWN(np.array(counts), np.array(before), sampled)))
        for counts, before, sampled in wanted
    ]


def test_waves_keep_to_the_settings() -> None:
    for most, longest in ((1, 256), (8, 1_000), (256, 100_000)):
        config = CONFIG.with_values(max_num_seqs=most, max_model_len=longest)
        found = waves(config)
        assert max(wave.rows for wave in found) <= most
        assert all(wave.rows > 0 and wave.prompt + wave.outputs <= longest for wave in found)
        assert max(wave.prompt for wave in found) >= min(LONG, longest - 50)


def test_terms_of_an_engine_are_those_of_its_device() -> None:
    clock = VirtualClock()
    terms, request_ms = engine_terms(CONFIG, SPEC, device(clock), clock, wanted_s=0.0)
    predict = MeasuredStepTime(terms, windows_of(SPEC))
    for rows, context in ((1, 40), (1, 1_500), (10, 300), (32, 64)):
        assert predict.decode(rows, context) == pytest.approx(KNOWN.decode(rows, context), rel=0.06)
    for prompt in (20, 100, 256):
        assert predict.prompt(prompt) == pytest.approx(KNOWN.prompt(prompt), rel=0.06)
    mixed = (np.array([1] * 8 + [120]), np.array([100] * 8 + [0]), 9)
    assert predict(*mixed) == pytest.approx(KNOWN(*mixed), rel=0.06)
    assert request_ms == pytest.approx(0.0, abs=0.1 * predict.prompt(16))
