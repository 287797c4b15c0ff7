"""Adapters over one, two and four ranks, stages, and ranks with whole experts: tokens and log probabilities are PEFT's.

Rows of several adapters and of none share steps, and there are fewer slots than adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from quire import LLM
from quire.compute.kernels.dispatch import KERNELS
from quire.offline import local_engine
from tests.adapters import ALL
from tests.adapters_as_on_a_gpu import serve_as_a_gpu
from tests.checkpoints import make_tiny
from tests.executor.gpu_ranks_in_threads import use_ranks_in_threads
from tests.executor.thread_ranks import ThreadRanks
from tests.models.divisible import DIVISIBLE
from tests.offline.test_lora import Stage, random_prompts
from tests.offline.test_lora_experts import EXPERTS

TOKENS = 10
LENGTHS = (9, 21, 14, 33, 5)
SEVERAL: dict[str, dict[str, Any]] = {
    "all": {"rank": 8},
    "dora": {"rank": 4, "use_dora": True, "lora_alpha": 12},
    "stabilised": {"rank": 16, "modules": ("q_proj", "o_proj", "down_proj"), "use_rslora": True},
    "one layer": {"rank": 5, "modules": ("k_proj", "up_proj"), "layers_to_transform": [2]},
}


def two_kinds(*modules: str) -> dict[str, dict[str, Any]]:
    """All modules; and with magnitudes, whose norms are of whole rows."""
    return {"all": {"rank": 8, "modules": modules}, "dora": {"rank": 4, "modules": modules, "use_dora": True}}


REFERENCES = dict.fromkeys(("route", "pack_experts", "experts"), "experts") | {
    "lora_shrink": "lora",
    "lora_expand": "lora",
    "lora_expand_silu_and_mul": "lora",
    "lora_rms_norm": "lora",
}
"""What computes experts and updates, by its module."""
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama, biases": SEVERAL,
    "llama, one kv head": two_kinds(*ALL),
    "phi3": two_kinds("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": two_kinds("c_attn", "c_proj", "c_fc"),
    "mixtral": EXPERTS,
    "qwen3 moe, experts": EXPERTS,
    "qwen3 moe": {"router": {"rank": 8, "modules": ("gate", "v_proj")}, **two_kinds("q_proj", "k_proj", "o_proj")},
}


@pytest.fixture(scope="module")
def stage_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stage]:
    """The adapters of a case, and PEFT's model of them."""

    @cache
    def of(case: str) -> Stage:
        torch.set_num_threads(1)
        directory = tmp_path_factory.mktemp("adapters")
        model = make_tiny(directory / "model", **{"num_hidden_layers": 3} | DIVISIBLE[case.partition(", experts")[0]])
        return Stage(directory, model, CASES[case], start=False)

    return of


def check(stage: Stage, **ranks: Any) -> None:
    """Of prompts that are computed in chunks, and of tokens behind them."""
    names = [*stage.paths, None, "all" if "all" in stage.paths else None][: len(LENGTHS)]
    prompts = random_prompts(3, list(LENGTHS[: len(names)]))
    with LLM(
        str(stage.model), dtype="float32", device="cpu", enable_lora=True, max_loras=2, max_cpu_loras=3,
        max_lora_rank=16, skip_tokenizer_init=True, num_gpu_blocks_override=64, max_model_len=128,
        max_num_batched_tokens=24, **ranks,
    ) as llm:  # fmt: skip
        outputs = stage.generate(prompts, names, llm, max_tokens=TOKENS, prompt_logprobs=1)
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == stage.greedy(prompt, name, TOKENS), name
        expected = stage.reference.logits(prompt, name).log_softmax(-1)
        for at, reported in enumerate(output.prompt_logprobs[1:], 1):
            for token, found in reported.items():
                assert abs(found.logprob - float(expected[at - 1, token])) < 1e-4, (name, at)


@pytest.mark.parametrize(
    ("case", "tp", "pp"),
    [
        ("llama, biases", 2, 1),
        ("llama, biases", 4, 1),
        ("llama, biases", 1, 2),
        pytest.param("llama, biases", 2, 2, marks=pytest.mark.long("many cards")),
        ("llama, one kv head", 2, 1),
        ("phi3", 2, 1),
        pytest.param("phi3", 4, 1, marks=pytest.mark.long("many cards")),
        ("gpt2", 2, 1),
        pytest.param("gpt2", 4, 1, marks=pytest.mark.long("many cards")),
        ("mixtral", 2, 1),
        ("qwen3 moe", 4, 1),
    ],
)
def test_ranks_say_what_peft_says(
    case: str, tp: int, pp: int, stage_of: Callable[[str], Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engine, "build_executor", ThreadRanks)
    check(stage_of(case), tensor_parallel_size=tp, pipeline_parallel_size=pp)


@pytest.mark.parametrize(
    ("case", "tp", "pp"),
    [
        ("mixtral", 2, 1),
        pytest.param("mixtral", 2, 3, marks=pytest.mark.long("many cards")),
        ("qwen3 moe", 4, 1),
    ],
)
def test_ranks_with_whole_experts_say_what_peft_says(
    case: str, tp: int, pp: int, stage_of: Callable[[str], Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of experts too: a rank has those of its own."""
    monkeypatch.setattr(local_engine, "build_executor", ThreadRanks)
    check(stage_of(case), tensor_parallel_size=tp, pipeline_parallel_size=pp, enable_expert_parallel=True)


@pytest.mark.parametrize(
    ("case", "tp", "pp", "whole_experts"),
    [
        ("mixtral", 2, 1, False),
        ("mixtral", 2, 1, True),
        ("mixtral", 2, 2, True),
        ("qwen3 moe, experts", 4, 1, True),
    ],
)
def test_ranks_that_serve_experts_as_gpus_do_say_what_peft_says(
    case: str,
    tp: int,
    pp: int,
    whole_experts: bool,
    stage_of: Callable[[str], Stage],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All products of a layer's experts together, in steps that are replayed: plain torch takes the kernels' place."""
    use_ranks_in_threads(monkeypatch)
    serve_as_a_gpu(monkeypatch)
    for op, module in REFERENCES.items():
        for device in ("cpu", "cuda"):
            monkeypatch.setitem(KERNELS, (op, device), f"quire.compute.kernels.reference.{module}:{op}")
    check(stage_of(case), tensor_parallel_size=tp, pipeline_parallel_size=pp, enable_expert_parallel=whole_experts)
