"""Two cards that divide a model say what one says: fp32 greedy text that is transformers' own, with graphs, over cached
blocks and after preemptions; bf16 about as near to the exact logits as transformers' bf16; with adapters PEFT's. A rank
that dies is named.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import EngineDeadError
from quire.runtime.executor.multi_rank_executor import MultiRankExecutor
from tests.checkpoints import make_llama, make_tiny
from tests.gpu.adapted import answers
from tests.gpu.several_cards import NEEDS_TWO, assert_as_near, assert_preempted_text, assert_text
from tests.gpu.test_parity import BLOCKS, GREEDY, SETTINGS, TIE
from tests.offline.test_lora import KINDS, Stage
from tests.parity.cases import CASES
from tests.parity.test_architectures import TOKENS, prompts
from tests.quantization import made
from tests.quantization.test_checkpoints import WEIGHT_ONLY, WITH_ACTIVATIONS
from tests.quantization.test_divided import SHAPE

pytestmark = [pytest.mark.gpu, NEEDS_TWO]
TWO: dict[str, Any] = {"tensor_parallel_size": 2, **SETTINGS}
DIVISIBLE = ["qwen3, wide heads", "qwen3 moe", "gemma3", "gpt2"]


@pytest.mark.parametrize("case", DIVISIBLE)
def test_float32_text_is_transformers(case: str, tmp_path: Path) -> None:
    assert_text(case, tmp_path, TWO)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_text_is_transformers(mode: str, tmp_path: Path) -> None:
    assert_preempted_text(DIVISIBLE[0], tmp_path, mode, TWO)


def test_bfloat16_is_as_near_as_transformers(tmp_path: Path) -> None:
    assert_as_near(DIVISIBLE[0], tmp_path, TWO)


@pytest.mark.parametrize("settings", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}, {"enforce_eager": True}])
def test_settings_of_one_card_are_served(settings: dict[str, Any], tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[DIVISIBLE[0]])
    assert_mostly_the_same(directory, settings)


@pytest.mark.parametrize("case", ["compressed", "awq", "fp8, blocks", "fp8, channels"])
def test_quantized_checkpoints_are_served(case: str, tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE)
    made.quantize(directory, *(WEIGHT_ONLY | WITH_ACTIVATIONS)[case])
    assert_mostly_the_same(directory, {})


def assert_mostly_the_same(directory: Path, settings: dict[str, Any]) -> None:
    """First tokens are those of one card with the same settings, but for one: sums are rounded otherwise."""
    batch, said = prompts(), []
    for ranks in (1, 2):
        given: dict[str, Any] = TWO | settings | {"tensor_parallel_size": ranks}
        with LLM(str(directory), dtype="bfloat16", **BLOCKS, **given) as llm:
            said.append([output.outputs[0].token_ids[0] for output in llm.generate(batch, GREEDY)])
    same = sum(one == two for one, two in zip(*said, strict=True))
    assert same >= len(batch) - 1, said


def test_seeded_choices_are_those_of_one_card(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[DIVISIBLE[0]])
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=TOKENS, ignore_eos=True)
    said = []
    for ranks in (1, 2):
        with LLM(str(directory), dtype="float32", **BLOCKS, **(TWO | {"tensor_parallel_size": ranks})) as llm:
            said.append([output.outputs[0].token_ids for output in llm.generate(prompts(), params)])
    assert said[0] == said[1]


def test_tokens_of_adapters_are_pefts(tmp_path: Path) -> None:
    assert_adapted(tmp_path, TWO)


def assert_adapted(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Some with magnitudes, beside rows of the base model, in graphs, and in fewer slots than there are adapters."""
    model = make_llama(tmp_path / "model", tokenizer=False)
    stage = Stage(tmp_path, model, {name: KINDS[name] for name in ("all", "attention", "down")}, start=False)
    names, batch = [*stage.paths, None, "all", None], prompts()
    names = names[: len(batch)]
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    with LLM(str(model), dtype="float32", **lora, **BLOCKS, **settings) as llm:
        for _ in range(2):
            for name, tokens, logprobs, _ in answers(stage, llm, batch[: len(names)], names, TOKENS):
                drawn = logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
                assert float((logprobs.amax(1) - drawn).max()) < TIE, name


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **CASES[DIVISIBLE[0]])
    with LLM(str(directory), dtype="float32", **BLOCKS, **TWO) as llm:
        executor = llm._engine._core._executor
        assert isinstance(executor, MultiRankExecutor)
        assert executor._ranks is not None
        os.kill(executor._ranks._children[1].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"Rank 1 of 2 \(process \d+\) died: .*SIGKILL"):
            llm.generate(prompts(), GREEDY)
