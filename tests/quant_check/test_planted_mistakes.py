"""A good quantization of the built-in model, and the same with one layer's scales × 1.3, on prompts that it knows."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quant_check.command import checked
from tests.quant_check.test_check import changed, quantized_copy

QUILL = Path(__file__).parents[2] / "quire" / "builtin" / "quill"
QUESTIONS = {
    "What is 17 plus 25?": "42",
    "Sort list: 21, 76, 53, -12, 8.": "-12, 8, 21, 53, 76",
    "Which number comes after 34?": "35",
    "Please list eight towns.": None,
    "reverse this string vsuuqk.": "kquusv",
}
MODULES = {
    "gptq": "model.layers.5.mlp.up_proj",
    "int8, channels": "model.layers.3.self_attn.v_proj",
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": question}]} | ({"answer": answer} if answer else {})
        for question, answer in QUESTIONS.items()
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture(scope="module")
def quill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In one file."""
    directory = tmp_path_factory.mktemp("quill") / "model"
    shutil.copytree(QUILL, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights = {name: tensor for file in QUILL.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def scale(module: str, stored: dict[str, Tensor]) -> None:
    """The mistake."""
    (name,) = (name for name in stored if name.startswith(f"{module}.") and "scale" in name)
    stored[name] = (stored[name].float() * 1.3).to(stored[name].dtype)


@pytest.mark.parametrize("name", MODULES)
def test_a_planted_mistake_is_told_from_a_good_quantization(
    name: str, quill: Path, prompts: Path, tmp_path: Path
) -> None:
    good, _ = quantized_copy(quill, tmp_path / "good", name)
    arguments = ("--prompts", prompts, "--max-tokens", 32, "--worst-layers", 2)
    code, result = checked(tmp_path, quill, good, *arguments)
    assert (code, result["verdict"], result["failures"]) == (0, "good", [])
    assert result["score"]["questions"] == 4
    module = MODULES[name]
    bad = changed(good, tmp_path / "bad", partial(scale, module))
    code, result = checked(tmp_path, quill, bad, *arguments)
    assert (code, result["verdict"]) == (1, "bad")
    worst = result["layers"][0]
    assert module.rpartition(".")[2] in worst["name"]
    assert worst["name"].startswith(module.rpartition(".")[0])
    assert any(module.rpartition(".")[2] in line and "has an error of 0.3" in line for line in result["failures"])
    assert worst["kl_alone"] > 2 * result["layers"][1]["kl_alone"]


def test_figures_repeat(quill: Path, prompts: Path, tmp_path: Path) -> None:
    arguments = (quill, quill, "--quantization", "fp8", "--prompts", prompts, "--max-tokens", 32, "--worst-layers", 1)
    first, second = (checked(tmp_path, *arguments)[1] for _ in range(2))
    assert 0 < first["kl"]["mean"] < 0.1
    assert first == second
