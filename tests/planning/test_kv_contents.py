"""What blocks on disk are for: another way to compute keys and values is another digest."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.models.spec import spec_of
from quire.planning.kv_cache_plan import check_host_tier
from quire.planning.kv_contents import contents_digest
from tests.checkpoints import make_tiny
from tests.models_sweep.rows import ROWS, SHAPE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    return tmp_path


def config(model: Path, **settings: Any) -> Config:
    return Config().with_values(model=str(model), dtype="float32", **settings)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"}, {"block_size": 32}, {"kv_cache_dtype": "int8"}, {"tensor_parallel_size": 2},
        {"hf_overrides": {"rope_theta": 5.0}}, {"quantization": "fp8"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    ],
)  # fmt: skip
def test_another_setting_is_another_digest(model: Path, change: dict[str, Any]) -> None:
    own = config(model)
    assert contents_digest(own) == contents_digest(config(model))
    assert contents_digest(own) != contents_digest(own.with_values(**change))


def test_other_scales_versions_and_files_are_another_digest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = config(model)
    digests = {contents_digest(own), contents_digest(own, b"scales"), contents_digest(own, b"others")}
    monkeypatch.setattr("quire.planning.kv_contents.__version__", "another")
    digests.add(contents_digest(own))
    os.utime(model / "model.safetensors", ns=(1, 1))
    digests.add(contents_digest(own))
    (model / "model.safetensors").write_bytes(bytes(9))
    os.utime(model / "model.safetensors", ns=(1, 1))
    digests.add(contents_digest(own))
    assert len(digests) == 6


def test_sizes_of_pools_are_no_part_of_it(model: Path) -> None:
    """So that a server may be given more memory and find what it had."""
    own = config(model)
    more = dataclasses.replace(own.cache, kv_offloading_size=9.0, kv_disk_size=9.0, num_gpu_blocks_override=9)
    assert contents_digest(own) == contents_digest(dataclasses.replace(own, cache=more))


@pytest.mark.parametrize(
    ("architecture", "settings", "why"),
    [
        ("LlamaForCausalLM", {}, "needs --kv-offloading-size"),
        ("LlamaForCausalLM", {"kv_offloading_size": 1, "tensor_parallel_size": 2}, "one engine of one rank"),
        ("LlamaForCausalLM", {"kv_offloading_size": 1, "kv_disk_size": 0}, "--kv-disk-size must be above 0"),
        ("Lfm2ForCausalLM", {"kv_offloading_size": 1}, "this model's states stay on the device"),
    ],
)
def test_a_disk_that_would_serve_nobody_is_refused(
    tmp_path: Path, architecture: str, settings: dict[str, Any], why: str
) -> None:
    model = make_tiny(tmp_path, architecture, **SHAPE | ROWS[architecture])
    asked = Config().with_values(model=str(model), kv_disk_path=str(tmp_path / "disk"), **settings)
    with pytest.raises(ConfigError, match=why):
        check_host_tier(asked, spec_of(asked.model))
