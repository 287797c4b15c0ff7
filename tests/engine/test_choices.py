"""What is chosen when nothing is asked, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config import Config
from quire.engine.choices import GIB, Choices, Machine, choose, this_machine
from quire.errors import ConfigError, MemoryBudgetError, ModelNotFoundError
from tests.checkpoints import make_llama

ROOMY = Machine(memory_bytes=64 * GIB, native_bfloat16=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", dtype="bfloat16")


def chosen(checkpoint: Path, machine: Machine = ROOMY, **settings: object) -> Choices:
    return choose(Config().with_values(model=str(checkpoint), **settings), machine)


def test_everything_open_is_resolved_with_a_reason(checkpoint: Path) -> None:
    choices = chosen(checkpoint)
    config = choices.config
    assert (config.model.dtype, config.model.max_model_len) == ("bfloat16", 512)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 512)
    assert config.cache.num_gpu_blocks_override == 256 * 512 // 16
    assert config.model.served_model_name == (str(checkpoint),)
    assert len(choices.reasons) == 5
    assert "the checkpoint's" in choices.reasons[1]


def test_float32_where_bfloat16_is_slow(checkpoint: Path) -> None:
    choices = chosen(checkpoint, Machine(64 * GIB, native_bfloat16=False))
    assert choices.config.model.dtype == "float32"
    assert "no bfloat16" in choices.reasons[1]


def test_what_is_asked_is_taken(checkpoint: Path) -> None:
    config = chosen(
        checkpoint, dtype="float", max_model_len=100, max_num_seqs=3, kv_cache_memory_bytes=10**6, block_size=8
    ).config
    block_bytes = 8 * 2 * 3 * 2 * 16 * 4  # tokens × keys and values × layers × kv heads × head_dim × fp32
    assert (config.model.dtype, config.model.max_model_len) == ("float32", 100)
    assert config.cache.num_gpu_blocks_override == 10**6 // block_bytes


def test_the_cache_is_a_share_of_what_is_left(checkpoint: Path) -> None:
    tight = chosen(checkpoint, Machine(4 * 2**20, native_bfloat16=True))
    blocks = tight.config.cache.num_gpu_blocks_override
    assert blocks is not None
    assert 0 < blocks * 16 * 2 * 3 * 2 * 16 * 2 <= 0.4 * 4 * 2**20
    with pytest.raises(MemoryBudgetError, match="lower --max-model-len"):
        chosen(checkpoint, Machine(2**19, native_bfloat16=True))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_model_len": 513}, ConfigError, "--max-model-len 513"),
        ({"max_model_len": 1}, ConfigError, "--max-model-len 1"),
        ({"max_num_seqs": 0}, ConfigError, "--max-num-seqs must be at least 1"),
        ({"max_num_batched_tokens": 0}, ConfigError, "--max-num-batched-tokens must be at least 1"),
        ({"num_gpu_blocks_override": 0}, ConfigError, "--num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 5}, MemoryBudgetError, "raise it"),
        ({"tokenizer": "/no/such/tokenizer"}, ModelNotFoundError, "/no/such/tokenizer"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(
    checkpoint: Path, settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        chosen(checkpoint, **settings)


def test_this_machine_has_memory() -> None:
    assert this_machine().memory_bytes > 2**28
