"""--hf-overrides: values that replace those of config.json, for all that reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.compute.kernels.cpu.library import library
from quire.errors import CheckpointError
from quire.models.weights.config_overrides import merged, overridden
from tests.checkpoints import edit_config, make_llama

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PROMPT = list(range(5, 45))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library()  # from the usual cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "overrides"


def tokens(directory: Path, **settings: Any) -> list[int]:
    with LLM(str(directory), dtype="float32", skip_tokenizer_init=True, max_num_seqs=2, **settings) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("generation", [4, 5])
def test_a_model_computes_as_if_its_file_had_the_values(generation: int, tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", tokenizer=False, generation=generation)
    before = (directory / "config.json").read_bytes()
    asked = tokens(directory, hf_overrides={"rope_scaling": YARN, "max_position_embeddings": 128})
    assert (directory / "config.json").read_bytes() == before
    edited = make_llama(tmp_path / "edited", tokenizer=False, generation=4)
    edit_config(edited, lambda config: config.update(rope_scaling=YARN, max_position_embeddings=128))
    assert asked == tokens(edited)
    assert asked != tokens(directory)


def test_the_directory_is_made_once_and_links_what_it_does_not_change(tmp_path: Path, cache: Path) -> None:
    directory = make_llama(tmp_path / "model")
    assert overridden(directory, {}) == directory
    made = overridden(directory, {"eos_token_id": 7})
    assert json.loads((made / "config.json").read_text())["eos_token_id"] == 7
    assert (made / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    assert {path.name for path in made.iterdir()} == {path.name for path in directory.iterdir()}
    assert overridden(directory, {"eos_token_id": 7}) == made
    assert overridden(directory, {"eos_token_id": 8}) != made
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3}}),
        ({"text_config": {"b": 1, "c": 2}}, {"text_config": {"b": 3}}, {"text_config": {"b": 3, "c": 2}}),
        ({"quantization_config": {"b": 1, "c": 2}}, {"quantization_config": {"b": 3}},
         {"quantization_config": {"b": 3}}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, {"rope_theta": 7.0},
         {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 7.0}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5}},
         {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
         {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0, "partial_rotary_factor": 0.5}}),
        ({"architectures": ["Qwen3ForCausalLM"]},
         {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]},
         {"architectures": ["Qwen3ForCausalLM"], "classifier_from_token": ["no", "yes"]}),
        ({"rope_scaling": None, "rope_theta": 5.0}, {"rope_scaling": YARN}, {"rope_scaling": YARN, "rope_theta": 5.0}),
    ],
)  # fmt: skip
def test_how_values_are_merged(config: dict[str, Any], overrides: dict[str, Any], expected: dict[str, Any]) -> None:
    assert merged(config, overrides) == expected


def test_what_cannot_be_applied_is_said(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", tokenizer=False)
    edit_config(
        directory, lambda config: config.update(rope_parameters={"full_attention": {}, "sliding_attention": {}})
    )
    with pytest.raises(CheckpointError, match=r"--hf-overrides cannot be applied to .*: its rope_parameters differ"):
        overridden(directory, {"rope_theta": 7.0})
    with pytest.raises(CheckpointError, match="no such file or directory"):
        overridden(tmp_path, {"a": 1})
