"""Tiny quantized checkpoints, good ones and ones with a planted mistake, through the whole command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.planning.machine import Machine
from quire.text.tokenizer import load_tokenizer
from quire.tools.quant_check import both_models, forward
from quire.tools.quant_check.continuations import read_passages
from tests.checkpoints import edit_config, make_llama, make_tiny
from tests.models_sweep.rows import ROWS
from tests.quant_check.command import check, checked
from tests.quantization import made
from tests.quantization.test_checkpoints import WEIGHT_ONLY, WITH_ACTIVATIONS, packed

SHAPE: dict[str, Any] = {"hidden": 128, "intermediate": 256, "layers": 3, "std": 0.08}
PROMPTS = [[5, 9, 200, 31], [7] * 9, list(range(40, 120))]
LENIENT = ("--max-kl", 9, "--min-top1-agreement", 0, "--max-perplexity-ratio", 9)
"""For random weights: whose likeliest token any rounding changes."""


def changed(directory: Path, to: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint with other weights."""
    shutil.copytree(directory, to)
    stored = load_file(to / "model.safetensors")
    change(stored)
    save_file(stored, to / "model.safetensors", {"format": "pt"})
    return to


def quantized_copy(base: Path, to: Path, name: str) -> tuple[Path, Path]:
    """A quantized checkpoint, and the dense one that it stands for."""
    config, make = (WEIGHT_ONLY | WITH_ACTIVATIONS)[name]
    shutil.copytree(base, to)
    return to, made.quantize(to, config, make)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base") / "model", **SHAPE)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    return file


@pytest.fixture(scope="module")
def four_bits(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return quantized_copy(base, tmp_path_factory.mktemp("good") / "model", "gptq")


def reference_logits(directory: Path, texts: list[list[int]], change: Path | None = None, module: str = "") -> Tensor:
    """By transformers, of all tokens but the last of each text; with one module's weight from another checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if change is not None:
        model.get_submodule(module).weight.copy_(load_file(change / "model.safetensors")[f"{module}.weight"])
    return torch.cat([model(torch.tensor([text])).logits[0, :-1] for text in texts])


def mean_kl(logits: Tensor, other: Tensor) -> float:
    p, q = logits.log_softmax(-1), other.log_softmax(-1)
    return float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean())


@torch.inference_mode()
def test_figures_on_the_built_in_texts_are_those_of_transformers(base: Path, tmp_path: Path) -> None:
    good, dense = quantized_copy(base, tmp_path / "good", "compressed, channels")
    code, result = checked(tmp_path, base, good, "--worst-layers", 0, "--max-perplexity-ratio", 1.2)
    assert code == 0
    tokenizer = load_tokenizer(base)
    texts = [tokenizer.encode(passage)[:512] for passage in read_passages()]
    targets = torch.tensor([token for text in texts for token in text[1:]])
    ours, theirs = (reference_logits(directory, texts) for directory in (base, dense))
    agreement = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    perplexities = [float(torch.nn.functional.cross_entropy(each, targets).exp()) for each in (ours, theirs)]
    assert (result["num_texts"], result["num_tokens"]) == (len(texts), len(targets))
    assert result["kl"]["mean"] == pytest.approx(mean_kl(ours, theirs), rel=0.01)
    assert result["top1_agreement"] == pytest.approx(agreement, abs=0.002)
    assert [result["perplexity"][key] for key in ("base", "quantized")] == pytest.approx(perplexities, rel=1e-3)


@torch.inference_mode()
def test_a_layer_causes_alone_what_it_does_in_transformers(
    base: Path, four_bits: tuple[Path, Path], tmp_path: Path
) -> None:
    """And its error is that of its product on the base model's activations."""
    from transformers import AutoModelForCausalLM

    good, dense = four_bits
    _, result = checked(tmp_path, base, good, "--worst-layers", 12, *LENIENT)
    texts = [load_tokenizer(base).encode(passage)[:512] for passage in read_passages()]
    module = "model.layers.1.mlp.down_proj"
    (layer,) = [layer for layer in result["layers"] if layer["name"] == module]
    alone = mean_kl(reference_logits(base, texts), reference_logits(base, texts, dense, module))
    assert layer["kl_alone"] == pytest.approx(alone, rel=0.02)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weight = load_file(dense / "model.safetensors")[f"{module}.weight"]
    errors: list[Tensor] = []

    def compare(_: Any, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        errors.append((inputs[0] @ weight.T - y).norm(dim=-1).flatten() / y.norm(dim=-1).flatten())

    model.get_submodule(module).register_forward_hook(compare)
    for text in texts:
        model(torch.tensor([text]))
    assert layer["errors"][module] == pytest.approx(float(torch.cat(errors).mean()), rel=0.01)
    assert {layer["name"] for layer in result["layers"]} >= {f"model.layers.{n}.mlp.down_proj" for n in range(3)}
    assert [layer["kl_alone"] for layer in result["layers"]] == sorted(
        (layer["kl_alone"] for layer in result["layers"]), reverse=True
    )


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3ForCausalLM"])
def test_figures_are_the_same_without_room_for_both_models(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Layers are read when they compute then: experts, norms of heads and tied embeddings too."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128, "tie_word_embeddings": True}
    base = make_tiny(tmp_path / "base", architecture, **shape)
    good = tmp_path / "good"
    shutil.copytree(base, good)
    config = packed(8, 32, True) | {"ignore": ["lm_head", r"re:.*\.gate$"]}
    made.quantize(good, config, partial(made.compressed, bits=8, group=32, symmetric=True))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2, 3]}\n{"prompt": [8, 8, 9, 4, 200, 31]}')
    arguments = (base, good, "--prompts", prompts, "--max-tokens", 8, "--worst-layers", 3, *LENIENT)
    code, result = checked(tmp_path, *arguments)
    assert "too little for the weights" not in capfd.readouterr().err
    monkeypatch.setattr(both_models, "this_machine", lambda: Machine(memory_bytes=1000, fast_bfloat16=False))
    other_code, other = checked(tmp_path, *arguments)
    assert "too little for the weights of both models" in capfd.readouterr().err
    assert len([layer for layer in result["layers"] if layer["kl_alone"]]) == 3
    assert (code, result) == (other_code, other)


@pytest.mark.parametrize("architecture", ["GptOssForCausalLM", "Glm4MoeForCausalLM"])
def test_parts_that_are_no_layers_of_their_own_are_read(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks of attention and corrections of routers, also where layers are read when they compute."""
    base = make_tiny(tmp_path / "base", architecture, hidden_size=64, num_attention_heads=4, **ROWS[architecture])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2, 3]}')
    options = ("--quantization", "fp8", "--prompts", prompts, "--max-tokens", 4, "--worst-layers", 1, *LENIENT)
    expected = checked(tmp_path, base, base, *options)
    monkeypatch.setattr(both_models, "this_machine", lambda: Machine(memory_bytes=1000, fast_bfloat16=False))
    assert checked(tmp_path, base, base, *options) == expected
    assert 0 < expected[1]["kl"]["mean"] < 0.1


def test_figures_do_not_depend_on_how_texts_are_batched(
    base: Path, four_bits: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several in a step, one in a step, and in chunks."""
    arguments = (base, four_bits[0], "--worst-layers", 1, *LENIENT)
    _, result = checked(tmp_path, *arguments)
    monkeypatch.setattr(forward, "TOKENS_A_STEP", 300)
    _, other = checked(tmp_path, *arguments)
    assert other["kl"]["mean"] == pytest.approx(result["kl"]["mean"], rel=1e-3)
    assert other["layers"][0]["kl_alone"] == pytest.approx(result["layers"][0]["kl_alone"], rel=1e-3)


def test_steps_take_as_many_neighbours_as_fit() -> None:
    assert forward._batches([1000, 1000, 100, 5000, 3]) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert forward._batches([1] * 65) == [range(64), range(64, 65)]


def test_scales_that_are_no_numbers_are_bad(
    base: Path, prompts: Path, four_bits: tuple[Path, Path], tmp_path: Path
) -> None:
    def spoil(stored: dict[str, Tensor]) -> None:
        stored["model.layers.2.mlp.down_proj.scales"][0, 3] = torch.nan

    bad = changed(four_bits[0], tmp_path / "bad", spoil)
    code, result = checked(tmp_path, base, bad, "--prompts", prompts, "--max-tokens", 4)
    assert (code, result["verdict"], result["kl"]["mean"]) == (1, "bad", None)
    assert result["layers"][0]["name"] == "model.layers.2.mlp.down_proj"
    assert result["layers"][0]["kl_alone"] is None
    assert any("model.layers.2.mlp.down_proj has an error of nan" in line for line in result["failures"])


def test_a_block_whose_norm_took_scales_is_swapped_whole(
    base: Path, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As after AWQ: parts of it differ, the block does not, and none of it is called wrong."""
    scales = torch.linspace(0.5, 2, SHAPE["hidden"])

    def move_scales(stored: dict[str, Tensor]) -> None:
        for name in ("q_proj", "k_proj", "v_proj"):
            stored[f"model.layers.1.self_attn.{name}.weight"] *= scales
        stored["model.layers.1.input_layernorm.weight"] /= scales

    good, _ = quantized_copy(changed(base, tmp_path / "scaled", move_scales), tmp_path / "good", "compressed, channels")
    arguments = ("--prompts", prompts, "--max-tokens", 8, "--worst-layers", 1)
    code, result = checked(tmp_path, base, good, *arguments)
    assert code == 0, result["failures"]
    (block,) = [layer for layer in result["layers"] if layer["name"] == "model.layers.1"]
    assert block["errors"] == {}
    assert 0 < block["kl_alone"] < 0.01
    assert not any(layer["name"].startswith("model.layers.1.") for layer in result["layers"])
    assert "norms of 1 blocks differ" in result["notes"][0]


@pytest.mark.parametrize(
    ("flag", "limit"),
    [("max-kl", 0), ("min-top1-agreement", 1.01), ("max-perplexity-ratio", 0.5), ("max-layer-error", 0.001)],
)
def test_each_threshold_decides(
    flag: str, limit: float, base: Path, prompts: Path, four_bits: tuple[Path, Path], tmp_path: Path
) -> None:
    arguments = (base, four_bits[0], "--prompts", prompts, "--max-tokens", 4, "--worst-layers", 0, *LENIENT)
    code, result = checked(tmp_path, *arguments, f"--{flag}", limit)
    assert code == 1
    assert result["failures"]
    assert all(f"--{flag}" in line for line in result["failures"])
    assert result["thresholds"][flag.replace("-", "_")] == limit


def test_the_picture_has_all_layers(base: Path, prompts: Path, four_bits: tuple[Path, Path], tmp_path: Path) -> None:
    picture = tmp_path / "new" / "check.svg"
    check(base, four_bits[0], "--prompts", prompts, "--max-tokens", 4, "--worst-layers", 2, "--picture", picture)
    text = picture.read_text()
    ElementTree.fromstring(text)
    for name in ("q_proj/k_proj/v_proj", "o_proj", "gate_proj/up_proj", "down_proj"):
        assert name in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate": 128}, "different models: mlp width is 256 and 128"),
        ({"layers": 2}, "different models: number of layers is 3 and 2"),
        ({"vocab_size": 400}, "different models: vocab size is"),
        ({"rope": "llama3"}, "different models"),
    ],
)
def test_models_that_are_not_one_in_two_forms_are_refused(
    change: dict[str, Any], message: str, base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert check(base, make_llama(tmp_path / "other", **SHAPE | change)) == 2
    assert message in capfd.readouterr().err


def test_one_model_under_both_names_is_refused(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check(base, base) == 2
    assert "--quantization fp8" in capfd.readouterr().err


def test_tokenizers_that_differ_are_refused(
    base: Path, four_bits: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(four_bits[0], tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = content["model"]["merges"][:-20]
    file.write_text(json.dumps(content))
    assert check(base, tmp_path / "other") == 2
    assert "different vocabularies" in capfd.readouterr().err


def test_a_model_that_is_not_there_is_named(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check(base, "/nowhere/model") == 3
    assert "/nowhere/model" in capfd.readouterr().err


def test_a_bf16_checkpoint_can_be_checked_as_it_would_be_quantized_at_the_start(base: Path, tmp_path: Path) -> None:
    code, result = checked(tmp_path, base, base, "--quantization", "fp8", "--worst-layers", 0, *LENIENT)
    assert code == 0
    assert 1e-4 < result["kl"]["mean"] < 0.1
    assert {layer["name"].rpartition(".")[2] for layer in result["layers"]} >= {"o_proj", "down_proj"}


def test_a_base_that_is_quantized_itself_is_compared_as_it_is(
    base: Path, prompts: Path, four_bits: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(four_bits[0], copy)
    edit_config(copy, {"max_position_embeddings": 256})
    code, result = checked(tmp_path, four_bits[0], copy, "--prompts", prompts, "--max-tokens", 4)
    assert (code, result["kl"]["mean"], result["top1_agreement"], result["layers"]) == (0, 0, 1, [])


def test_texts_that_the_base_model_does_not_know_say_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The built-in model answers questions about itself and knows no prose."""
    code, result = checked(tmp_path, "quill", "quill", "--quantization", "fp8", "--worst-layers", 0)
    assert result["failures"] == []
    assert (code, result["verdict"]) == (1, "inconclusive")
    out = capsys.readouterr().out
    assert "good:" not in out
    assert "does not know these texts: give --prompts" in out
    assert "\ninconclusive: " in out
    code, result = checked(
        tmp_path, "quill", "quill", "--quantization", "fp8", "--worst-layers", 0, "--max-layer-error", 1e-6
    )
    assert (code, result["verdict"]) == (1, "bad")
