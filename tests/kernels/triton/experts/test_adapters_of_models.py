"""Whole models whose adapters change experts, as a GPU serves them, beside PEFT: kernels are interpreted where there is
no card, and steps are staged, padded and replayed as graphs are. `tests/gpu/test_lora_experts.py` is the same on one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from quire import LLM
from quire.compute.kernels.dispatch import KERNELS
from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.step import Step
from tests.adapters_as_on_a_gpu import serve_as_a_gpu
from tests.checkpoints import make_tiny
from tests.models.divisible import DIVISIBLE
from tests.offline.test_drafts_ahead import running_ahead
from tests.offline.test_lora import Stage, random_prompts
from tests.offline.test_lora_experts import EXPERTS
from tests.worker.replay_by_running import ReplayByRunning

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a card")
TOKENS = 3
LENGTHS = (3, 9, 1, 4, 6)
NAMES: list[str | None] = ["experts", None, "others", "experts", "attention"]
KINDS = EXPERTS | {"attention": {"rank": 4, "modules": ("q_proj", "k_proj")}}
"""The last one leaves experts alone."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' products are its kernels', and what finishes low-rank updates of attention."""
    serve_as_a_gpu(monkeypatch)
    for op in ("route", "pack_experts", "experts", "qk_norm_rope_and_cache"):
        monkeypatch.setitem(KERNELS, (op, "cpu"), KERNELS[op, "cuda"])


@pytest.fixture(scope="module")
def stage_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stage]:
    """The adapters of a case, and PEFT's model of them."""

    @cache
    def of(case: str) -> Stage:
        torch.set_num_threads(1)
        directory = tmp_path_factory.mktemp("adapters")
        model = make_tiny(directory / "model", **DIVISIBLE[case])
        return Stage(directory, model, KINDS, start=False)

    return of


def check(stage: Stage, slots: int = 3, lengths: tuple[int, ...] = LENGTHS, **settings: Any) -> dict[str, Any]:
    """Tokens and log probabilities are PEFT's; what the engine counts."""
    prompts = random_prompts(3, list(lengths))
    with LLM(
        str(stage.model), dtype="float32", device="cpu", enable_lora=True, max_loras=slots, max_cpu_loras=3,
        max_lora_rank=16, skip_tokenizer_init=True, max_model_len=64,
        **{"num_gpu_blocks_override": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4} | settings,
    ) as llm:  # fmt: skip
        outputs = stage.generate(prompts, NAMES, llm, max_tokens=TOKENS, logprobs=1)
        counts: dict[str, Any] = llm._local.client.counts()
    for prompt, name, output in zip(prompts, NAMES, outputs, strict=True):
        (choice,) = output.outputs
        tokens = list(choice.token_ids)
        assert tokens == stage.greedy(prompt, name, TOKENS), name
        expected = stage.reference.logits(prompt + tokens, name)[len(prompt) - 1 : -1].log_softmax(-1)
        for row, entries in zip(expected, choice.logprobs, strict=True):
            for token, entry in entries.items():
                assert abs(entry.logprob - float(row[token])) < 1e-4, name
    return counts


@pytest.mark.long("engine")
def test_steps_that_are_replayed_say_what_peft_says(stage_of: Callable[[str], Stage]) -> None:
    """Rows of several adapters and of none share steps; those of which none changes experts have graphs without."""
    graphs: list[ReplayByRunning] = []
    kinds: list[Adapted] = []

    class Watched(ReplayByRunning):
        def replay(self, step: Step) -> torch.Tensor:
            kinds.append(step.adapted)
            return super().replay(step)

    with running_ahead(graphs, Watched):
        check(stage_of("qwen3 moe"))
    (captured,) = graphs
    assert {adapted for _, adapted in captured.steps} == set(Adapted)
    assert Adapted.EXPERTS in kinds


@pytest.mark.long("engine")
def test_preemption_and_too_few_slots_change_nothing(stage_of: Callable[[str], Stage]) -> None:
    lengths = (15, 14, 15, 15, 3)  # their second block is one too many
    with running_ahead():
        counts = check(stage_of("mixtral"), slots=2, lengths=lengths, num_gpu_blocks_override=4)
    assert counts["preemptions"]
