"""float16 on a card, through LLM: logits that are transformers' own in float16, from dense weights and from quantized
ones, and what float16 cannot hold.

Transformers reads prompt and answer and says what it would have drawn each token from, as in test_parity.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.errors import CheckpointError, ConfigError
from tests.checkpoints import make_llama, make_tiny
from tests.gpu.test_parity import (
    BLOCKS,
    EVERYTHING,
    EXACTLY,
    SETTINGS,
    answers_of,
    assert_near,
    logits_of,
    long_prompts,
)
from tests.parity.cases import CASES
from tests.parity.test_architectures import prompts
from tests.quantization import made
from tests.quantization.test_checkpoints import WEIGHT_ONLY, WITH_ACTIVATIONS, gptq, packed

pytestmark = pytest.mark.gpu
NEAR = 0.03
"""Of the largest logit, from transformers' in float16."""
DENSE = [
    "llama, 7 heads a group, biases, sharded",
    "mistral, window, 4.x",
    "qwen2, tied",
    "qwen3, wide heads",
    "mixtral",
    "qwen3 moe",
]
SHAPE: dict[str, Any] = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "layers": 2, "tokenizer": False}
"""Rows and columns that every kernel of Hopper takes."""
IN_GROUPS = {
    "gptq, groups of 128": (gptq(4, 128, True), partial(made.gptq, bits=4, group=128, symmetric=True)),
    "awq, groups of 128": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        partial(made.awq, group=128, symmetric=False),
    ),
    "compressed, channels of 4 bits": (
        packed(4, None, True),
        partial(made.compressed, bits=4, group=None, symmetric=True),
    ),
} | {name: WEIGHT_ONLY[name] for name in ("gptq, zeros", "gptq v2, 8 bits", "bitsandbytes nf4", "nvfp4, compressed")}


@pytest.mark.parametrize("case", DENSE)
def test_logits_are_transformers(case: str, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[case])
    batch, answers = prompts(), answers_in("float16", directory, prompts())
    assert_near(directory, batch, answers, torch.float16)
    if "experts" not in str(CASES[case]):  # a router may send a token elsewhere at the least difference
        assert_same(directory, batch, answers)


@pytest.mark.parametrize("asked", ["auto", "half"])
def test_logits_in_the_shapes_of_a_real_model(asked: str, tmp_path: Path) -> None:
    """Prompts of several chunks, and a batch that a graph of more rows serves, of a checkpoint in float16."""
    shape = {"hidden": 2048, "intermediate": 5632, "layers": 2, "heads": 16, "kv_heads": 4, "head_dim": 128}
    directory = make_llama(tmp_path, **shape, max_len=4096, vocab_size=1500, dtype="float16", tokenizer=False, std=0.03)
    large = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 400}
    with LLM(str(directory), dtype=asked, **large, **EXACTLY, **SETTINGS) as llm:
        assert llm._config.model.dtype == llm._config.kv_dtype == "float16"
        answers = answers_of(llm, long_prompts(), EVERYTHING)
    assert_near(directory, long_prompts(), answers, torch.float16)
    assert_same(directory, long_prompts(), answers)


@pytest.mark.parametrize("case", IN_GROUPS)
def test_logits_of_weights_in_groups_are_those_of_their_dense_weights(case: str, tmp_path: Path) -> None:
    """With one row and with more than fit a tile of few, in prompts of several chunks."""
    config, make = IN_GROUPS[case]
    directory = make_llama(tmp_path / "model", **SHAPE, dtype="float16", std=0.05)
    dense = made.quantize(directory, config, make)
    for batch in (prompts(), prompts()[:1]):
        assert_same(dense, batch, answers_in("auto", directory, batch))


@pytest.mark.parametrize("case", ["fp8, channels", "fp8, blocks", "int8, channels", "fp8, at the start", "fp8 cache"])
def test_rounded_activations_lose_no_more_than_in_bfloat16(case: str, tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE, std=0.05)
    dense, settings = directory, {}
    if case in WITH_ACTIVATIONS:
        dense = made.quantize(directory, *WITH_ACTIVATIONS[case])
    elif case == "fp8 cache":
        settings = {"kv_cache_dtype": "fp8"}
    else:
        settings = {"quantization": "fp8"}
    batch = long_prompts()[:2]
    errors = [
        error_of(dense, batch, answers_in(dtype, directory, batch, **settings)) for dtype in ("float16", "bfloat16")
    ]
    assert errors[0] < 1.1 * errors[1]
    assert errors[0] < 0.15  # 0.115 where weights are rounded at the start, in both


def test_sampled_tokens_are_those_that_the_logits_give(tmp_path: Path) -> None:
    """By the seed: rows drawn beside others are what they are alone, with filters and without."""
    directory = make_llama(tmp_path, **SHAPE, dtype="float16")
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}]
    params = [SamplingParams(seed=number, max_tokens=20, ignore_eos=True, **kind) for number, kind in enumerate(kinds)]
    with LLM(str(directory), **BLOCKS, **SETTINGS) as llm:
        together = llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)
        again = llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in together] == [each.outputs[0].token_ids for each in again]
    assert all(0 <= token < 320 for each in together for token in each.outputs[0].token_ids)


def test_weights_that_float16_does_not_hold_are_refused(tmp_path: Path) -> None:
    directory = make_llama(tmp_path, **SHAPE, dtype="bfloat16")
    stored = load_file(directory / "model.safetensors")
    stored["model.layers.1.mlp.down_proj.weight"][3, 4] = 1e5
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight: values beyond"):
        LLM(str(directory), dtype="float16", **BLOCKS, **SETTINGS)


def test_gemma_is_refused(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES["gemma3"])
    with pytest.raises(ConfigError, match="overflow in float16"):
        LLM(str(directory), dtype="half", **BLOCKS, **SETTINGS)


def answers_in(dtype: str, directory: Path, batch: list[list[int]], **settings: Any) -> list[tuple[list[int], Tensor]]:
    """By prompt: the tokens, and the logits they were drawn from."""
    with LLM(str(directory), dtype=dtype, **settings, **EXACTLY, **BLOCKS, **SETTINGS) as llm:
        return answers_of(llm, batch, EVERYTHING)


def assert_same(directory: Path, batch: list[list[int]], answers: list[tuple[list[int], Tensor]]) -> None:
    """Our logits are transformers' in float16, and our tokens what it would have drawn, but for ties."""
    theirs = logits_of(directory, torch.float16, batch, answers)
    ours = torch.cat([logits for _, logits in answers])
    tokens = torch.tensor([token for own, _ in answers for token in own])
    allowed = NEAR * theirs.abs().max()
    assert (ours - theirs).abs().max() < allowed
    assert (theirs.amax(-1) - theirs.gather(1, tokens[:, None])[:, 0]).max() < allowed


def error_of(directory: Path, batch: list[list[int]], answers: list[tuple[list[int], Tensor]]) -> float:
    """Beside the exact logits of these weights."""
    exact = logits_of(directory, torch.float32, batch, answers)
    ours = torch.cat([logits for _, logits in answers])
    return float(torch.linalg.vector_norm(ours - exact) / torch.linalg.vector_norm(exact))
