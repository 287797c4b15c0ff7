"""Models that compute whole texts in one step: what a step must have room for, and what blocks they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.planning.auto_config import ResolvedConfig, resolve
from quire.planning.kv_cache_plan import MeasuredMemory, plan_kv_cache
from quire.planning.machine import Gpu, Machine
from tests.checkpoints import TINY


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    config = {"architectures": ["BertForSequenceClassification"], "max_position_embeddings": 2048, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(TINY | config))
    return tmp_path


def resolved(directory: Path, **settings: object) -> ResolvedConfig:
    return resolve(
        Config().with_values(model=str(directory), **settings), Machine(memory_bytes=16 << 30, fast_bfloat16=False)
    )


def test_a_step_has_room_for_the_longest_text(directory: Path) -> None:
    assert resolved(directory).config.scheduler.max_num_batched_tokens == 2048
    assert resolved(directory, max_model_len=100).config.scheduler.max_num_batched_tokens == 512
    assert resolved(directory, max_num_batched_tokens=4096).config.scheduler.max_num_batched_tokens == 4096


def test_a_step_without_room_is_refused_with_both_numbers(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 1000 .* --max-model-len 2048.*") as error:
        resolved(directory, max_num_batched_tokens=1000)
    assert error.value.param == "max_num_batched_tokens"


def test_drafts_are_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="speculative"):
        resolved(directory, speculative_config={"method": "ngram", "num_speculative_tokens": 2})


def test_texts_hold_blocks_for_their_steps_alone(directory: Path) -> None:
    """Three steps of 4,096 tokens, and a block more for each of 100 texts, of one layer: however long texts may be."""
    found = resolved(directory, max_num_batched_tokens=4096, max_num_seqs=100, block_size=16)
    assert found.memory.num_blocks == 3 * (4096 // 16 + 100)
    assert found.spec.kv_block_bytes("float32", 16) == 16 * 2 * 48 * 4


def test_a_gpu_keeps_no_blocks_that_texts_cannot_hold(directory: Path) -> None:
    """Neither by the estimate of the start, nor by what the worker measures; one that has too few keeps them all."""
    gpu = Gpu("NVIDIA H200", (9, 0), 140 << 30, 140 << 30)
    config = Config().with_values(model=str(directory), max_num_batched_tokens=4096, max_num_seqs=100)
    found = resolve(config, Machine(memory_bytes=128 << 30, fast_bfloat16=True, gpu=gpu))
    of_all = 3 * (4096 // 16 + 100)
    assert found.memory.num_blocks == of_all
    assert found.memory.reason == "all texts of the steps in flight"
    block = found.spec.kv_block_bytes("float16", 16)
    measured = [plan_kv_cache(found.config, found.spec, MeasuredMemory(blocks * block)) for blocks in (10**6, 501)]
    assert [plan.num_blocks for plan in measured] == [of_all, 500]
