"""Adapters of experts on a card, beside PEFT: of Mixtral- and Qwen3-MoE-shaped models, in batches with rows of other
adapters and of none, in graphs and without, over cached blocks, after preemptions, in fewer slots than adapters.

What the engine says is judged token by token, as in test_parity.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM
from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.replay import CudaGraphs
from quire.runtime.worker.step import Step
from tests.gpu.adapted import TOKENS, answers, mean_errors, stages
from tests.gpu.several_cards import NEEDS_TWO
from tests.gpu.test_parity import BLOCKS, SETTINGS, TIE, wait_for_swap_space
from tests.offline.test_lora import Stage, random_prompts
from tests.offline.test_lora_experts import EXPERTS

pytestmark = pytest.mark.gpu
CASES = ["mixtral", "qwen3 moe"]
KINDS: dict[str, dict[str, Any]] = EXPERTS | {
    "attention": {"rank": 4, "modules": ("q_proj", "k_proj"), "use_dora": True}
}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 3, "max_lora_rank": 40}
NAMES: list[str | None] = ["experts", None, "others", "experts", "attention", None, "others"]
LENGTHS = [9, 21, 40, 1, 33, 18, 5]


@pytest.fixture(scope="module")
def stage_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stage]:
    return stages(tmp_path_factory, KINDS)


def check(stage: Stage, llm: LLM, names: list[str | None] = NAMES) -> None:
    """fp32 tokens are the likeliest, with PEFT's log probabilities."""
    prompts = random_prompts(3, LENGTHS[: len(names)])
    for name, tokens, rows, reported in answers(stage, llm, prompts, names):
        assert float((rows.amax(1) - rows[torch.arange(TOKENS), tokens]).max()) < TIE, name
        for row, entries in zip(rows, reported, strict=True):
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(float(row[token]), abs=TIE), name


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_float32_text_is_pefts(case: str, eager: bool, stage_of: Callable[[str], Stage]) -> None:
    stage = stage_of(case)
    with LLM(str(stage.model), dtype="float32", enforce_eager=eager, **LORA, **BLOCKS, **SETTINGS) as llm:
        for _ in range(2):  # over cached blocks
            check(stage, llm)


def test_steps_of_each_kind_are_replayed(stage_of: Callable[[str], Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the base model alone have graphs without adapters, and so on."""
    replay, kinds = CudaGraphs.replay, list[Adapted]()

    def watched(self: CudaGraphs, step: Step) -> Tensor:
        kinds.append(step.adapted)
        return replay(self, step)

    monkeypatch.setattr(CudaGraphs, "replay", watched)
    stage = stage_of("qwen3 moe")
    with LLM(str(stage.model), dtype="float32", **LORA, **BLOCKS, **SETTINGS) as llm:
        for names, kind in (
            ([None, None], Adapted.NOTHING),
            (["attention", None], Adapted.PROJECTIONS),
            (["attention", "others", None], Adapted.EXPERTS),
        ):
            kinds.clear()
            check(stage, llm, names)
            assert kind in kinds
            assert all(each.value <= kind.value for each in kinds)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_text_is_pefts(mode: str, stage_of: Callable[[str], Stage]) -> None:
    """In fewer slots than there are adapters."""
    stage = stage_of("mixtral")
    few: dict[str, Any] = {"num_gpu_blocks_override": 6, "preemption_mode": mode, "swap_space": 0.01}
    lora = LORA | {"max_loras": 2, "max_cpu_loras": 2}
    with LLM(
        str(stage.model), dtype="float32", max_model_len=80, max_num_batched_tokens=16, **few, **lora, **SETTINGS
    ) as llm:
        if mode == "swap":
            wait_for_swap_space(llm)
        check(stage, llm)
        assert llm._engine.counts()["preemptions"] > 0


@pytest.mark.parametrize("settings", [{"dtype": "float16"}, {}, {"quantization": "fp8"}])
@pytest.mark.parametrize("case", CASES)
def test_rounded_text_is_near_pefts(case: str, settings: dict[str, Any], stage_of: Callable[[str], Stage]) -> None:
    """On average as near as without an adapter, or up to twice as far; over weights of 8 bits, too."""
    stage = stage_of(case)
    errors = {}
    with LLM(str(stage.model), **{"dtype": "bfloat16"} | settings, **LORA, **BLOCKS, **SETTINGS) as llm:
        for name in (None, "experts", "others"):
            errors |= mean_errors(stage, llm, random_prompts(5, [24] * 6), [name] * 6)
    assert max(errors["experts"], errors["others"]) < 2 * errors[None] + TIE, errors


@NEEDS_TWO
@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_ranks_say_what_peft_says(case: str, whole_experts: bool, stage_of: Callable[[str], Stage]) -> None:
    stage = stage_of(case)
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": whole_experts}
    with LLM(str(stage.model), dtype="float32", **ranks, **LORA, **BLOCKS, **SETTINGS) as llm:
        for _ in range(2):
            check(stage, llm)
