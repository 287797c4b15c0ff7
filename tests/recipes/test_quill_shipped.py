"""The models in the package: their sizes and files, and that Quill answers as its card says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quill.chat import Message, render
from quill.decoding import answer_all
from quill.examination import examination, grade
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from quire import LLM, SamplingParams, builtin
from quire.engine.metrics.reader import Vector
from quire.runtime.worker.speculation.draft_lengths import Choice, DraftLengths

MEGABYTE = 10**6


def _files(name: str) -> list[Path]:
    return sorted(builtin.path(name).iterdir())


@pytest.mark.parametrize(
    ("name", "least", "most"), [("quill", 10_000_000, 13_000_000), ("quill_draft", 500_000, 1_500_000)]
)
def test_parameters(name: str, least: int, most: int) -> None:
    index = json.loads((builtin.path(name) / "model.safetensors.index.json").read_text())
    count = 0
    for file in set(index["weight_map"].values()):
        with safe_open(builtin.path(name) / file, "pt") as shard:
            for key in shard.keys():  # noqa: SIM118  # a shard is no mapping
                tensor = shard.get_tensor(key)
                assert tensor.dtype == torch.bfloat16
                assert index["weight_map"][key] == file
                assert tensor.isfinite().all()
                count += tensor.numel()
    assert least <= count <= most
    assert index["metadata"]["total_size"] == 2 * count


def test_the_package_stays_small() -> None:
    sizes = {file: file.stat().st_size for name in (*builtin.MODELS, *builtin.HEADS) for file in _files(name)}
    assert sum(sizes.values()) <= 35 * MEGABYTE
    assert max(sizes.values()) <= 15 * MEGABYTE


@pytest.mark.parametrize("name", builtin.MODELS)
def test_files_and_configuration(name: str) -> None:
    names = {file.name for file in _files(name)}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    config = json.loads((builtin.path(name) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 2048
    assert config["tie_word_embeddings"] is True
    assert config["head_dim"] == 64
    generation = json.loads((builtin.path(name) / "generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(builtin.path(name))
    assert tokenizer.convert_ids_to_tokens(generation["eos_token_id"]) == ["<|im_end|>", "<|endoftext|>"]


@pytest.mark.parametrize("name", builtin.HEADS)
def test_a_head_is_right_about_most_first_drafts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLengths, "choose", lambda self, tokens, slots, most: Choice(most, 1e6))
    assert {"config.json", "README.md"} <= {file.name for file in _files(name)}
    assert sum(file.stat().st_size for file in _files(name)) <= 5 * MEGABYTE
    asked = {"method": "eagle3", "model": name, "num_speculative_tokens": 4}
    with LLM("quill", max_model_len=2048, max_num_seqs=8, num_gpu_blocks_override=600, speculative_config=asked,
             disable_log_stats=False) as llm:  # fmt: skip
        questions: list[Any] = [render(sample.question, add_generation_prompt=True) for sample in examination(28)]
        llm.generate(questions, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
        (right,) = [metric.values for metric in llm.get_metrics() if isinstance(metric, Vector)]
        rows = next(metric.value for metric in llm.get_metrics() if metric.name.endswith("decode_num_drafts"))  # type: ignore
    assert right[0] > 0.8 * rows


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'quil'.*quill, quill_draft"):
        builtin.path("quil")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(builtin.path("quill"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(builtin.path("quill"))


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("hi", "Quill"),
        ("What is the capital of France?", "Paris"),
        ("what is 17 * 23", "391"),
        ("sort 5, 3, 9, 1", "1, 3, 5, 9"),
        ("reverse the word planet", "tenalp"),
        ("how many r's are in strawberry?", "3 times"),
        ("write a python function that adds two numbers", "return a + b"),
        ("who is the president of france", "tiny demonstration model"),
    ],
)
def test_first_questions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, expected: str
) -> None:
    prompt = render([Message("user", question)], add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=80, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert expected in answer
    assert answer.endswith("<|im_end|>")


def test_a_slice_of_the_examination() -> None:
    samples = [sample for sample in examination(14) if sample.task != "recall"]
    directory = builtin.path("quill")
    answers = answer_all(directory, samples, torch.float32, torch.device("cpu"), 13, 160)
    report = grade(samples, answers)
    assert report.overall.percent >= 90, report.table()
