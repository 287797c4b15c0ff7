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

from quire import LLM, SamplingParams
from quire.errors import EngineDeadError
from quire.runtime.executor.multi_rank_executor import MultiRankExecutor
from quire.sampling_params import StructuredOutputsParams
from tests.checkpoints import make_llama, make_tiny
from tests.gpu.several_cards import NEEDS_FOUR, NEEDS_TWO, assert_as_near, assert_preempted_text, assert_text
from tests.gpu.test_parity import BLOCKS, GREEDY, SETTINGS
from tests.gpu.test_tensor_parallel import assert_adapted
from tests.parity.cases import CASES
from tests.parity.test_architectures import TOKENS, prompts

pytestmark = [pytest.mark.gpu, NEEDS_TWO]
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, **SETTINGS}
OF_TWO: dict[str, Any] = {"tensor_parallel_size": 2, **STAGES}
QWEN = "qwen3, wide heads"


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (QWEN, STAGES),
        ("qwen3 moe", STAGES),
        ("gemma3", STAGES),
        ("gpt2", STAGES),
        pytest.param(QWEN, OF_TWO, marks=NEEDS_FOUR),
        pytest.param("qwen3 moe", OF_TWO, marks=NEEDS_FOUR),
    ],
)
def test_float32_text_is_transformers(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    assert_text(case, tmp_path, settings)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_text_is_transformers(mode: str, tmp_path: Path) -> None:
    assert_preempted_text(QWEN, tmp_path, mode, STAGES)


def test_bfloat16_is_as_near_as_transformers(tmp_path: Path) -> None:
    assert_as_near(QWEN, tmp_path, STAGES)


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
