"""`quire bench throughput|latency|startup` as they are typed, on a tiny real checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from tests.checkpoints import make_llama

SMALL = ["--max-model-len", "128", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", layers=1)


def bench(name: str, model: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, "--model", str(model), *SMALL, *arguments])
    return int(ended.value.code or 0)


def result(tmp_path: Path, name: str, model: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "result.json"
    assert bench(name, model, "--output-json", str(file), *arguments) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["machine"]["cores"]
    assert found["settings"]["max_model_len"] == 128
    return found


def test_throughput(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = result(tmp_path, "throughput", model, "--input-len=20", "--output-len=5", "--num-prompts=6", "--n=2")
    assert (found["num_requests"], found["total_input_tokens"], found["total_output_tokens"]) == (6, 120, 60)
    assert found["total_num_tokens"] == 180
    assert found["requests_per_second"] == pytest.approx(6 / found["elapsed_time"])
    assert found["tokens_per_second"] == pytest.approx(180 / found["elapsed_time"])
    assert "Throughput: " in capsys.readouterr().out


def test_throughput_of_texts_and_without_a_tokenizer(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "the quick brown fox"}\n{"prompt": "one two", "output_tokens": 3}\n')
    found = result(tmp_path, "throughput", model, "--dataset-path", str(file), "--custom-output-len", "4")
    assert (found["num_requests"], found["total_output_tokens"]) == (2, 7)
    bare = ["--skip-tokenizer-init", "--input-len=8", "--output-len=2", "--num-prompts=2", "--load-format=dummy"]
    assert result(tmp_path, "throughput", model, *bare)["total_output_tokens"] == 4


def test_latency(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = ["--input-len=8", "--output-len=3", "--batch-size=2", "--num-iters-warmup=1", "--num-iters=4"]
    found = result(tmp_path, "latency", model, *counts)
    assert len(found["latencies"]) == 4
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 4)
    assert min(found["latencies"]) <= found["percentiles"]["50"] <= max(found["latencies"])
    assert "Avg latency: " in capsys.readouterr().out


@pytest.mark.parametrize(("start", "kinds"), [("llm", ["cold", "warm"]), ("server", ["cold"]), ("engine", ["cold"])])
def test_startup_by_stage(
    start: str, kinds: list[str], tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = ["--num-iters-cold=1", "--num-iters-warmup=0", f"--num-iters-warm={len(kinds) - 1}", "--drop-files"]
    found = result(tmp_path, "startup", model, f"--start={start}", *counts)
    for kind in kinds:
        (stages,) = found[f"{kind}_startup_stages"]
        assert found[f"{kind}_startup_times"] == [stages["total"]]
        assert {"process", "import", "weights"} < stages.keys()
        assert sum(seconds for stage, seconds in stages.items() if stage != "total") == pytest.approx(stages["total"])
    assert "cold, 1 start(s)" in capsys.readouterr().out


def test_a_model_that_cannot_be_served_is_said_in_one_line(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("throughput", "latency", "startup"):
        assert bench(name, tmp_path / "none") == 3
        assert str(tmp_path / "none") in capsys.readouterr().err
    assert bench("latency", model, "--num-iters=0") == 2
    assert bench("throughput", model, "--n=0") == 2
    assert bench("startup", model, "--num-iters-cold=0", "--num-iters-warm=0") == 2
    assert bench("throughput", model, "--port=1") == 2


def test_a_benchmark_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("thruput", Path("x")) == 2
    assert "Benchmarks: throughput, latency, serve, agent, startup" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--help"])
    assert not ended.value.code
    assert "startup" in capsys.readouterr().out
