"""`quire simulate` as it is typed: the load that is asked for, figures, the rate within limits, errors by name."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.cli.main import main
from quire.cli.settings_fields import settings_of
from quire.foundation.config import Config
from quire.models.spec import read_spec
from quire.planning.costmodel.measured_step_times import MeasuredStepTimes, ServerTerms, StepTerms
from quire.tools.bench.datasets import DatasetOptions, LocalTokens, make_samples
from quire.tools.bench.load import ArrivalOptions, arrival_times
from quire.tools.simulation.load import asked_load, timed_load
from quire.tools.simulation.options import ServingOptions, SimulateOptions
from quire.tools.sizing.measured_rows import DIRECTORY

MODEL = DIRECTORY / "qwen3-0.6b"
SPEC = read_spec(MODEL)
SMALL = ("--num-prompts=40", "--input-len=100", "--output-len=12")


def simulate(tmp_path: Path, *flags: str, model: str = str(MODEL), code: int = 0) -> dict[str, Any]:
    with pytest.raises(SystemExit) as end:
        main(["simulate", model, "--json", str(tmp_path / "found.json"), *flags])
    assert end.value.code == code
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    return found


def test_figures_are_those_of_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(tmp_path, *SMALL, "--request-rate=50", f"--picture={tmp_path / 'p.svg'}")
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (40, 4_000, 480)
    assert found["request_rate"] == pytest.approx(50)
    assert found["output_throughput"] == pytest.approx(480 / found["duration"])
    assert 0 <= found["p50_queue_ms"] < found["p50_ttft_ms"] <= found["p99_ttft_ms"] < found["p99_e2el_ms"]
    assert 0 < found["mean_num_requests_running"] <= found["max_num_requests_running"] <= 40
    assert 0 < found["max_kv_cache_usage"] < 0.05
    assert found["slo"] is None
    out = capsys.readouterr().out
    assert "40 requests of 100 + 12 tokens on average, at 50 requests/s" in out
    assert "nothing held requests back" in out
    assert (tmp_path / "p.svg").read_text().count("Latency") == 1


def test_the_same_seed_is_the_same_load_and_another_is_another(tmp_path: Path) -> None:
    flags = (*SMALL, "--random-range-ratio=0.5", "--request-rate=400")
    first, again = simulate(tmp_path, *flags), simulate(tmp_path, *flags)
    assert first == again
    assert simulate(tmp_path, *flags, "--seed=1")["mean_ttft_ms"] != first["mean_ttft_ms"]


def test_the_load_is_the_one_that_bench_serve_sends_with_this_seed() -> None:
    dataset = DatasetOptions(num_prompts=20, input_len=50, output_len=9, random_range_ratio=0.3, random_prefix_len=8)
    arrivals = ArrivalOptions(request_rate=5, burstiness=0.5)
    options = SimulateOptions(model="m", seed=7, dataset=dataset, arrivals=arrivals)
    load, rng = asked_load(options, SPEC, MODEL), random.Random(7)
    samples = make_samples(dataset, LocalTokens(SPEC.vocab_size), rng)
    assert list(load.token_ids(SPEC.vocab_size)) == [sample.prompt for sample in samples]
    assert [each.output for each in load.requests] == [sample.output_len for sample in samples]
    assert [each.arrival for each in load.requests] == arrival_times(arrivals, 20, rng)


def test_another_rate_stretches_gaps_or_makes_them() -> None:
    dataset = DatasetOptions(num_prompts=50, input_len=5, output_len=2)
    timed = SimulateOptions(model="m", dataset=dataset, arrivals=ArrivalOptions(request_rate=5))
    at_once = SimulateOptions(model="m", dataset=dataset, arrivals=ArrivalOptions(burstiness=100.0))
    for options in (timed, at_once):
        load = timed_load(options, SPEC, MODEL)
        slow, fast = load.at_rate(10.0), load.at_rate(20.0)
        assert (slow.rate, fast.rate) == (pytest.approx(10), pytest.approx(20))
        assert [2 * each.arrival for each in fast.requests] == pytest.approx([each.arrival for each in slow.requests])
    gaps = [b.arrival - a.arrival for a, b in zip(slow.requests, slow.requests[1:], strict=False)]
    assert max(gaps) < 2 * min(gaps), "a burstiness of 100 is all but even"


def test_shared_prefixes_are_found_in_the_cache_and_without_it_are_not(tmp_path: Path) -> None:
    flags = (
        "--dataset-name=prefix_repetition", "--num-prompts=40", "--prefix-repetition-prefix-len=256",
        "--prefix-repetition-suffix-len=64", "--prefix-repetition-num-prefixes=4", "--output-len=4",
        "--request-rate=20",
    )  # fmt: skip
    found = simulate(tmp_path, *flags)
    assert found["prefix_cache_hit_rate"] == pytest.approx(36 * 256 / (40 * 320))
    assert simulate(tmp_path, *flags, "--no-enable-prefix-caching")["prefix_cache_hit_rate"] == 0


def test_settings_reach_the_scheduler(tmp_path: Path) -> None:
    flags = ("--num-prompts=40", "--input-len=100", "--output-len=100")
    narrow = simulate(tmp_path, *flags, "--max-num-seqs=4")
    assert narrow["max_num_requests_running"] == narrow["max_num_seqs"] == 4
    assert any("all --max-num-seqs 4 were running" in line for line in narrow["reasons"])
    tight = simulate(tmp_path, *flags, "--num-gpu-blocks-override=100", "--max-model-len=1024")
    assert tight["preemptions"] > 0
    assert tight["kv_cache_tokens"] == 1_600
    assert any(f"{tight['preemptions']} preemptions" in line for line in tight["reasons"])
    whole, half = (simulate(tmp_path, *SMALL, *more)["kv_cache_tokens"] for more in ((), ("--kv-cache-dtype=fp8",)))
    assert half == pytest.approx(2 * whole, rel=0.05)


def test_the_highest_rate_keeps_the_limits_and_a_slightly_higher_one_does_not(tmp_path: Path) -> None:
    flags = ("--num-prompts=30", "--input-len=2000", "--output-len=12")
    found = simulate(tmp_path, *flags, "--slo=ttft=25,tpot=20")
    best = found["slo"]["request_rate"]
    assert found["slo"]["attainment"] >= 0.99
    assert found["request_rate"] == pytest.approx(best), "what is shown is the best rate"
    assert found["p99_ttft_ms"] <= 26
    tried = {each["request_rate"]: each["attainment"] for each in found["slo"]["tried"]}
    assert any(best < rate < 1.02 * best and share < 0.99 for rate, share in tried.items())
    at_double = ("--slo=ttft=25,tpot=20", f"--request-rate={2 * best}")
    over = simulate(tmp_path, *flags, *at_double, code=1)
    assert over["request_rate"] == pytest.approx(2 * best), "a rate that is asked for is shown"
    assert over["slo"]["request_rate"] == pytest.approx(best, rel=0.02)


def test_limits_out_of_reach_are_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(tmp_path, *SMALL, "--slo=ttft=0.01", code=1)
    assert found["slo"]["request_rate"] is None
    assert "have TTFT above 0.01 ms" in capsys.readouterr().out


def test_timed_steps_are_gone_by(tmp_path: Path) -> None:
    spec = read_spec("quire/builtin/quill")
    terms = StepTerms(points=((1, 40.0), (512, 40.0)), row_ms=0.0, chunk_ms=0.0, read_ms=0.0, score_ms=0.0, error=0.01)
    timed = MeasuredStepTimes(
        "quill",
        spec.num_parameters,
        "bfloat16",
        "bfloat16",
        2,
        ((None, 8),),
        terms,
        1.0,
        ServerTerms(4.0, 0.5, 2.0, 0.0),
    )
    (tmp_path / "steps.json").write_bytes(msgspec.json.encode(timed))
    flags = ("--gpu=cpu", "--dtype=bfloat16", f"--step-times={tmp_path / 'steps.json'}")
    found = simulate(tmp_path, *flags, "--num-prompts=1", "--input-len=100", "--output-len=3", model="quill")
    assert found["p50_ttft_ms"] == pytest.approx(1 + 4 + 42 + 0.5)
    assert found["p50_tpot_ms"] == pytest.approx(42)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu=h900"], "--gpu h900 is not known"),
        (["--slo=ttft"], "--slo takes limits"),
        (["--slo=ttft=5", "--slo-attainment=0"], "--slo-attainment"),
        (["--slo=ttft=5", "--max-concurrency=3"], "leave --max-concurrency out"),
        (["--calibrate"], "give --gpu cpu"),
        (["--cpu-threads=2"], "--cpu-threads is for --gpu cpu"),
        (["--gpu=cpu", "--step-times=nothing.json"], "nothing.json cannot be read"),
        (["--trace=a.csv", "--dataset-path=b.jsonl"], "not both"),
        (["--trace=nothing.csv"], "nothing.csv cannot be read"),
        (["--request-rate=0"], "--request-rate must be above 0"),
        (["--num-prompts=1", "--input-len=100000"], "Request 1 of the trace"),
        (["--tensor-parallel-size=7"], "7"),
        (["--metric-percentiles=101"], "--metric-percentiles are between 0 and 100"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["simulate", str(MODEL), *SMALL[:1], *flags])
    assert end.value.code not in (0, None)
    assert words in capsys.readouterr().err


def test_settings_have_the_names_types_and_defaults_of_the_server() -> None:
    own = {setting.name: setting for setting in settings_of(Config)}
    for each in settings_of(ServingOptions):
        assert each.default == own[each.name].default, each.name
        if each.name != "max_model_len":  # a simulation takes no `auto`
            assert each.kind == own[each.name].kind, each.name
    assert {each.name for each in fields(ServingOptions)} <= set(own)
