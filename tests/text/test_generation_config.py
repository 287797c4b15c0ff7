"""Defaults come from the model, then from flags, and a request's own value wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError, ConfigError
from quire.foundation.config import Config, ModelConfig
from quire.text.generation_config import DefaultSampling, default_sampling, eos_ids
from quire.text.model_text import load_model_text
from tests.checkpoints import IM_END_ID, write_tokenizer


def model(directory: Path, file: dict[str, Any] | None = None, **options: Any) -> ModelConfig:
    if file is not None:
        (directory / "generation_config.json").write_text(json.dumps(file))
    return ModelConfig(model=str(directory), **options)


def test_the_models_values_are_defaults_and_the_requests_win(tmp_path: Path) -> None:
    file = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "max_new_tokens": 50, "do_sample": True}
    defaults = default_sampling(model(tmp_path, file))
    assert defaults == DefaultSampling(temperature=0.6, top_p=0.9, max_tokens=50)
    assert defaults.fill({"top_p": 0.5, "temperature": None, "seed": 1}) == {
        "temperature": 0.6,
        "top_p": 0.5,
        "seed": 1,
    }
    assert defaults.fill({"temperature": 0.0})["temperature"] == 0.0


def test_flags_replace_the_models_values(tmp_path: Path) -> None:
    file = {"temperature": 0.6}
    assert default_sampling(model(tmp_path, file, generation_config="vllm")) == DefaultSampling()
    overrides = {"temperature": 0.1, "top_k": 5}
    assert default_sampling(model(tmp_path, file, override_generation_config=overrides)).temperature == 0.1
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match="does not exist"):
        default_sampling(model(tmp_path, generation_config=str(other)))
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    assert default_sampling(model(tmp_path, generation_config=str(other))).top_p == 0.5
    with pytest.raises(ConfigError, match="'best' is not one of"):
        default_sampling(model(tmp_path, override_generation_config={"best": 1}))
    with pytest.raises(ConfigError, match="top_p must be in"):
        default_sampling(model(tmp_path, override_generation_config={"top_p": 7}))
    with pytest.raises(ConfigError, match="repetition_penalty must be greater than 0"):
        default_sampling(model(tmp_path, override_generation_config={"repetition_penalty": 0}))


def test_wrong_values_are_said_at_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="temperature must be at least 0"):
        default_sampling(model(tmp_path, {"temperature": -1}))


def test_a_penalty_of_the_model_is_a_default_too(tmp_path: Path) -> None:
    assert default_sampling(model(tmp_path, {"repetition_penalty": 1.05})).repetition_penalty == 1.05
    overrides = {"repetition_penalty": 1.1}
    assert default_sampling(model(tmp_path, override_generation_config=overrides)).repetition_penalty == 1.1


def test_end_tokens_come_from_the_model_and_its_tokenizer(tmp_path: Path) -> None:
    assert eos_ids(tmp_path, None) == ()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 5}}')
    assert eos_ids(tmp_path, 2) == (5, 2)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert eos_ids(tmp_path, 7) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert eos_ids(tmp_path, 2) == (3, 4, 2)


def test_everything_is_loaded_together(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    text = load_model_text(Config().with_values(model=str(tmp_path)))
    assert text.tokenizer is not None
    assert text.chat_template is not None
    assert text.eos_ids == (IM_END_ID,)
    bare = load_model_text(Config().with_values(model=str(tmp_path), skip_tokenizer_init=True))
    assert (bare.tokenizer, bare.chat_template) == (None, None)
