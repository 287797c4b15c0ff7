"""What models are computed in, by what is asked for, the checkpoint and the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.planning.auto_config import ResolvedConfig, resolve
from quire.planning.footprint import GIB
from quire.planning.machine import Gpu, Machine
from tests.checkpoints import edit_config, make_llama

CPU = Machine(64 * GIB, fast_bfloat16=True)
SLOW_CPU = Machine(64 * GIB, fast_bfloat16=False)
GPU = Machine(64 * GIB, fast_bfloat16=True, gpu=Gpu("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB), why_no_gpu="")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_llama(tmp_path, dtype="float16", tokenizer=False)


def gemma(checkpoint: Path) -> Path:
    """As it would be of a Gemma, whose weights nobody reads here."""
    edit_config(checkpoint, {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"})
    return checkpoint


def resolve_for(checkpoint: Path, machine: Machine, dtype: str = "auto") -> ResolvedConfig:
    return resolve(Config().with_values(model=str(checkpoint), skip_tokenizer_init=True, dtype=dtype), machine)


@pytest.mark.parametrize(
    ("asked", "stored", "machine", "found", "reason"),
    [
        ("auto", "float16", GPU, "float16", "the checkpoint's"),
        ("auto", "bfloat16", GPU, "bfloat16", "the checkpoint's"),
        ("auto", "float32", GPU, "float32", "the checkpoint's"),
        ("float16", "bfloat16", GPU, "float16", "as asked"),
        ("half", "bfloat16", GPU, "float16", "as asked"),
        ("bfloat16", "float16", GPU, "bfloat16", "as asked"),
        ("float", "float16", GPU, "float32", "as asked"),
        ("auto", "float16", CPU, "bfloat16", "for float16 weights on a CPU"),
        ("half", "float32", CPU, "bfloat16", "in place of half, which is slow on a CPU"),
        ("float16", "float16", SLOW_CPU, "float32", "this processor has no bfloat16 products"),
    ],
)
def test_a_dtype_is_chosen_with_a_reason(
    asked: str, stored: str, machine: Machine, found: str, reason: str, checkpoint: Path
) -> None:
    edit_config(checkpoint, {"dtype": stored})
    resolved = resolve_for(checkpoint, machine, asked)
    assert resolved.config.model.dtype == found
    assert resolved.reasons[2].startswith(f"dtype       {found}: {reason}")


@pytest.mark.parametrize(
    ("machine", "found", "reason"),
    [
        (CPU, "bfloat16", "for float32 weights on a CPU"),
        (SLOW_CPU, "float32", "this processor has no bfloat16 products"),
        (GPU, "float16", "for float32 weights of a model that makes no tokens"),
    ],
    ids=["cpu", "slow cpu", "gpu"],
)
def test_models_that_make_no_tokens_are_halved(machine: Machine, found: str, reason: str, checkpoint: Path) -> None:
    """Embedding models are published in float32, which costs twice as much and changes no ranking."""
    edit_config(checkpoint, {"dtype": "float32", "architectures": ["LlamaForSequenceClassification"]})
    resolved = resolve_for(checkpoint, machine)
    assert resolved.config.model.dtype == found
    assert resolved.reasons[2].startswith(f"dtype       {found}: {reason}")


def test_float16_is_as_small_as_bfloat16(checkpoint: Path) -> None:
    footprints = [resolve_for(checkpoint, GPU, dtype).memory.footprint for dtype in ("float16", "bfloat16")]
    assert footprints[0] == footprints[1]


def test_gemma_overflows_in_float16(checkpoint: Path) -> None:
    """Its float16 checkpoints are computed in bfloat16, and float16 is refused where it would be computed."""
    resolved = resolve_for(gemma(checkpoint), GPU)
    assert resolved.config.model.dtype == "bfloat16"
    assert "overflow in float16" in resolved.reasons[2]
    with pytest.raises(ConfigError, match="--dtype half: activations of Gemma2ForCausalLM overflow") as refused:
        resolve_for(checkpoint, GPU, "half")
    assert refused.value.param == "dtype"
    assert resolve_for(checkpoint, CPU, "half").config.model.dtype == "bfloat16"


@pytest.mark.parametrize("asked", ["float8", "fp16", "torch.float16"])
def test_a_dtype_that_there_is_not_is_refused(asked: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=f"dtype: '{asked}' is not one of auto, bfloat16, float, float16"):
        resolve_for(checkpoint, GPU, asked)


@pytest.mark.parametrize("asked", ["float16", "half", torch.float16])
def test_an_llm_in_float16_answers_on_a_cpu_as_in_bfloat16(asked: Any, checkpoint: Path) -> None:
    settings = {"device": "cpu", "skip_tokenizer_init": True, "num_gpu_blocks_override": 40}
    with LLM(str(checkpoint), dtype=asked, **settings) as llm, LLM(str(checkpoint), **settings) as usual:
        assert [each.outputs[0].token_ids for each in llm.generate([[5, 6, 7]], use_tqdm=False)] == [
            each.outputs[0].token_ids for each in usual.generate([[5, 6, 7]], use_tqdm=False)
        ]
