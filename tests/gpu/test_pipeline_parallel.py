"""Stages on two cards, and two stages of two cards each, say what one card says: fp32 greedy text that is transformers'
own, with graphs, over cached blocks and after preemptions; bf16 about as near to the exact logits as theirs; rows with
grammars; with adapters PEFT's. A stage that dies is named.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import EngineDeadError
from quire.executor.multi_rank_executor import MultiRankExecutor
from quire.sampling import StructuredOutputsParams
from tests.checkpoints import make_llama, make_tiny
from tests.gpu.test_parity import (
    BLOCKS,
    EVERYTHING,
    EXACTLY,
    GREEDY,
    SETTINGS,
    answers_of,
    assert_all_free,
    assert_greedy,
    assert_near,
    wait_for_swap_space,
)
from tests.gpu.test_tensor_parallel import assert_adapted
from tests.parity.cases import CASES
from tests.parity.oracle import Oracle
from tests.parity.test_architectures import CHUNK, TOKENS, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards"),
    pytest.mark.usefixtures("not_refused_on_gpus"),
]
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, **SETTINGS}
OF_TWO: dict[str, Any] = {"tensor_parallel_size": 2, **STAGES}
FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four cards")
QWEN = "qwen3, wide heads"


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (QWEN, STAGES),
        ("qwen3 moe", STAGES),
        ("gemma3", STAGES),
        ("gpt2", STAGES),
        pytest.param(QWEN, OF_TWO, marks=FOUR),
        pytest.param("qwen3 moe", OF_TWO, marks=FOUR),
    ],
)
def test_float32_text_is_transformers(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[case])
    reference, batch = Oracle(directory, device="cuda"), prompts()
    with LLM(str(directory), dtype="float32", **BLOCKS, **settings) as llm:
        for prompt, output in zip(batch, llm.generate(batch, GREEDY), strict=True):
            assert_greedy(reference, prompt, output)
        (again,) = llm.generate([batch[2]], GREEDY)
        assert again.num_cached_tokens == 80
        assert_greedy(reference, batch[2], again)
        assert_all_free(llm)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_text_is_transformers(mode: str, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[QWEN])
    reference, batch = Oracle(directory, device="cuda"), prompts()
    few: dict[str, Any] = {"num_gpu_blocks_override": 16, "preemption_mode": mode, "swap_space": 0.01}
    with LLM(str(directory), dtype="float32", max_num_batched_tokens=CHUNK, **few, **STAGES) as llm:
        if mode == "swap":
            wait_for_swap_space(llm)
        for prompt, output in zip(batch, llm.generate(batch, GREEDY), strict=True):
            assert_greedy(reference, prompt, output)
        assert llm._engine.counts()["preemptions"] > 0


def test_bfloat16_is_as_near_as_transformers(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[QWEN])
    with LLM(str(directory), dtype="bfloat16", **EXACTLY, **BLOCKS, **STAGES) as llm:
        answers = answers_of(llm, prompts(), EVERYTHING)
    assert_near(directory, prompts(), answers)


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"quantization": "fp8"}])
def test_all_tokens_are_those_of_one_card(settings: dict[str, Any], tmp_path: Path) -> None:
    """Seeded choices too: a pipeline computes nothing in another order. Steps are not padded alike, so a tie may fall
    the other way in bf16: one output may differ."""
    directory = make_llama(tmp_path, layers=5, hidden=256, heads=4, kv_heads=2, intermediate=512, tokenizer=False)
    batch = prompts() * 4
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    dtype, said = "bfloat16" if settings.get("quantization") else "float32", []
    for stages in (1, 2):
        given = STAGES | settings | {"pipeline_parallel_size": stages}
        with LLM(str(directory), dtype=dtype, **BLOCKS, **given) as llm:
            outputs = llm.generate(batch, GREEDY) + llm.generate(batch, seeded)
            said.append([list(output.outputs[0].token_ids) for output in outputs])
    same = sum(one == two for one, two in zip(*said, strict=True))
    assert same >= len(said[0]) - (dtype == "bfloat16") * len(batch), f"{same} of {len(said[0])}"


def test_masked_rows_follow_their_grammar(tmp_path: Path) -> None:
    """Beside others, while plans come that wait behind them."""
    directory = make_llama(tmp_path, layers=3)
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    masked = SamplingParams(
        temperature=1.0, seed=1, max_tokens=60, structured_outputs=StructuredOutputsParams(json=schema)
    )
    free = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    batch = ["Hello", "Once upon", "a", "the"] * 2
    with LLM(str(directory), dtype="float32", **BLOCKS, **(STAGES | {"skip_tokenizer_init": False})) as llm:
        for output, params in zip(llm.generate(batch, [masked, free] * 4), [masked, free] * 4, strict=True):
            if params is masked and output.outputs[0].finish_reason == "stop":
                assert json.loads(output.outputs[0].text)["a"] in ("x", "y")
            else:
                assert len(output.outputs[0].token_ids) == 60


def test_tokens_of_adapters_are_pefts(tmp_path: Path) -> None:
    assert_adapted(tmp_path, STAGES)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_dies_is_named(rank: int, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[QWEN])
    with LLM(str(directory), dtype="float32", **BLOCKS, **STAGES) as llm:
        executor = llm._engine._core._executor
        assert isinstance(executor, MultiRankExecutor)
        assert executor._ranks is not None
        os.kill(executor._ranks._children[rank].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"Rank {rank} of 2 \(process \d+\) died: .*SIGKILL"):
            llm.generate(prompts(), GREEDY)
