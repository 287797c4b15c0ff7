"""benchmarks/cpu: its checkpoints are what other engines read, and what it says follows from the seconds."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quire.models.quantization.formats import Int8Format
from quire.models.spec import read_spec

HERE = Path(__file__).parents[2] / "benchmarks" / "cpu"
MODULES = ("checkpoints", "int8_checkpoint", "workloads", "report", "engine_client", "environments")
sys.path.insert(0, str(HERE))  # its files are scripts beside each other
before = {name: sys.modules.pop(name, None) for name in MODULES}
checkpoints, int8_checkpoint, workloads, report, engine_client, environments = (
    importlib.import_module(name) for name in MODULES
)
for name, module in before.items():
    sys.modules.pop(name)
    if module is not None:
        sys.modules[name] = module
sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("checkpoints")
    checkpoint: Path = checkpoints.make_checkpoint("tiny", directory)
    return checkpoint


def test_transformers_reads_the_checkpoint_whole(made: Path) -> None:
    model, said = AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16, output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert not said["mismatched_keys"]
    weight = model.model.layers[0].self_attn.q_proj.weight.detach()
    assert 0 < weight.abs().max() <= checkpoints.SPREAD
    assert weight.float().std() == pytest.approx(checkpoints.SPREAD / 3**0.5, rel=0.02)
    assert not torch.equal(weight, model.model.layers[1].self_attn.q_proj.weight)
    bits = torch.from_numpy(checkpoints.read_tensor(made, "model.layers.0.self_attn.q_proj.weight").copy())
    assert torch.equal(bits.view(torch.bfloat16), weight)


def test_int8_weights_are_the_checkpoints_to_half_a_step_and_are_served(made: Path) -> None:
    directory = int8_checkpoint.make_int8_checkpoint(made)
    dense, stored = load_file(made / "model.safetensors"), load_file(directory / "model.safetensors")
    quantized = [name for name in dense if f"{name}_scale" in stored]
    assert len(quantized) == 7 * checkpoints.config_of(made)["num_hidden_layers"] + 1
    for name in quantized:
        scale = stored[f"{name}_scale"]
        assert ((stored[name] * scale - dense[name].float()).abs() <= 0.51 * scale).all()
    spec = read_spec(directory)
    assert spec.quantization is not None
    assert isinstance(spec.quantization.format_of("model.layers.0.mlp.up_proj"), Int8Format)
    assert isinstance(spec.quantization.format_of("lm_head"), Int8Format)


def test_figures_follow_from_seconds() -> None:
    """An engine on which a prompt token takes 1 ms and a step after the first 10."""

    def seconds(inputs: list[int], outputs: list[int]) -> float:
        return sum(inputs) * 1e-3 + (max(outputs) - 1) * 1e-2

    every = workloads.workloads()
    assert every["W1"].measure(seconds) == pytest.approx({"W1 prefill": 1000, "W1 decode": 100, "W1 out": 128 / 1.398})
    assert every["W2"].measure(seconds) == pytest.approx({"W2 out": 2048 / (2.048 + 1.27)})
    assert len(every["W3"].inputs) == len(every["W3"].outputs) == 64
    assert set(workloads.BATCH_OF) <= {figure for w in every.values() for figure in w.measure(seconds)}


def test_tables_have_ratios_and_gaps() -> None:
    start = {"version": "1", "first_token_s": 2.0, "peak_rss_gb": 1.5}
    medians = {"W1 out": {"quire": 30.0, "vllm": 20.0}, "W2 out": {"quire": 90.0}}
    text = report.tables({"quire": start, "vllm": start}, medians)
    assert "| vllm | 1.50 |  |" in text
    assert "| vllm | 20.0 |  | 2.0 | 1.5 | 1 |" in text
    assert report.picture("tiny", medians).count("fill='none'") == 2


def test_an_engine_without_an_environment_is_skipped_with_a_word(tmp_path: Path) -> None:
    with pytest.raises(engine_client.EngineFailed, match="--install"):
        environments.interpreter("llama_cpp", tmp_path, install=False)


def test_quire_is_measured(made: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(HERE / "compare.py"),
        "--engines=quire",
        "--shape=tiny",
        "--workloads=W1",
        "--runs=1",
    ]
    places = [f"--environments={tmp_path}", f"--checkpoints={made.parent}", f"--json={tmp_path / 'found.json'}"]
    done = subprocess.run([*command, *places], capture_output=True, text=True, timeout=200, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["figure"] for row in found["rows"]] == ["W1 prefill", "W1 decode", "W1 out"]
    assert all(row["value"] > 0 for row in found["rows"])
    assert found["starts"]["quire"]["peak_rss_gb"] > 0.1
