"""Which starts keep packed weights, and what makes an older file stale."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.compute.kernels.cpu import packed_weight_file
from quire.compute.kernels.cpu.library import library
from quire.errors import ConfigError
from quire.foundation.config import environment
from quire.offline import local_engine
from quire.runtime.worker.startup import packed_weights as starting
from tests.checkpoints import edit_config, make_llama, make_tiny
from tests.executor.thread_ranks import ThreadRanks
from tests.models.divisible import DIVISIBLE

PROMPT = {"prompt_token_ids": [5, 9, 300, 41, 7]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory for packed weights, which small models use as well; compiled kernels are the user's."""
    if library() is None:
        pytest.skip("there are no kernels of our own")
    kernels = environment.native_kernels().cache
    (tmp_path / "quire").mkdir()
    (tmp_path / "quire" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(starting, "LEAST_BYTES", 0)
    return tmp_path / "quire" / "weights"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is packed and written, by name."""
    names: list[str] = []
    put = packed_weight_file._Writer.put

    def counted(self: packed_weight_file._Writer, name: str, packed: object) -> object:
        names.append(name)
        return put(self, name, packed)

    monkeypatch.setattr(packed_weight_file._Writer, "put", counted)
    return names


def tokens(model: Path, dtype: str = "bfloat16", **ranks: Any) -> list[int]:
    with LLM(str(model), dtype=dtype, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2, **ranks) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    return output.outputs[0].token_ids


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.packed"))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: make_llama(path, tokenizer=False),
        lambda path: make_llama(path, tokenizer=False, tie=True, attention_bias=True, shards="40KB"),
        lambda path: make_tiny(path, "Qwen3MoeForCausalLM"),
        lambda path: make_tiny(path, "GPT2LMHeadModel"),
    ],
    ids=["llama", "tied", "experts", "gpt2"],
)
def test_a_second_start_reads_the_file_and_says_the_same(
    make: Callable[[Path], Path], cache: Path, written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(tmp_path / "model")
    first = tokens(model)
    assert len(files(cache)) == 1
    assert len(set(written)) == len(written) > 4
    written.clear()
    assert tokens(model) == first
    assert not written
    monkeypatch.setenv("QUIRE_PACKED_WEIGHTS_GB", "0")
    assert tokens(model) == first


def _retrained(model: Path) -> None:
    make_llama(model, tokenizer=False, seed=1)


def _retrained_at_the_same_time(model: Path) -> None:
    weights = model / "model.safetensors"
    before = weights.stat()
    _retrained(model)
    assert weights.stat().st_size == before.st_size
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [_retrained, _retrained_at_the_same_time])
def test_other_weights_in_the_same_place_are_noticed(
    change: Callable[[Path], None], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama(tmp_path / "model", tokenizer=False)
    old = tokens(model)
    change(model)
    new = tokens(model)
    assert new != old
    assert len(files(cache)) == 2
    monkeypatch.setenv("QUIRE_PACKED_WEIGHTS_GB", "0")
    assert tokens(model) == new


def test_settings_and_dtypes_have_files_of_their_own(cache: Path, tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", tokenizer=False)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    tokens(model)
    tokens(model, "float32")
    tokens(copy)
    edit_config(model, {"rms_norm_eps": 1e-3})
    tokens(model)
    assert len(files(cache)) == 4


def test_parts_of_experts_and_whole_ones_have_files_of_their_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engine, "build_executor", ThreadRanks)
    model = make_tiny(tmp_path / "model", **DIVISIBLE["qwen3 moe"])
    parts = tokens(model, "float32", tensor_parallel_size=2)
    whole = tokens(model, "float32", tensor_parallel_size=2, enable_expert_parallel=True)
    assert len(files(cache)) == 4
    assert whole == parts


@pytest.mark.parametrize("reason", ["off", "small", "larger than the limit", "full", "dummy", "no kernels"])
def test_no_file_is_kept(reason: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama(tmp_path / "model", tokenizer=False)
    if reason == "off":
        monkeypatch.setenv("QUIRE_PACKED_WEIGHTS_GB", "0")
    elif reason == "small":
        monkeypatch.setattr(starting, "LEAST_BYTES", 1 << 26)
    elif reason == "larger than the limit":
        monkeypatch.setenv("QUIRE_PACKED_WEIGHTS_GB", "0.0001")
    elif reason == "full":
        monkeypatch.setattr(starting, "_free_bytes", lambda directory: 100_000)
    elif reason == "no kernels":
        monkeypatch.setattr(starting, "library", lambda: None)
    load_format = "dummy" if reason == "dummy" else "auto"
    LLM(str(model), load_format=load_format, skip_tokenizer_init=True, max_model_len=64).close()
    assert not cache.exists()


@pytest.mark.parametrize("value", ["much", "-1", "inf", "nan"])
def test_a_limit_that_is_no_number_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PACKED_WEIGHTS_GB", value)
    with pytest.raises(ConfigError, match=f"'{value}'"):
        environment.packed_weight_cache()
