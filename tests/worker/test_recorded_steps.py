"""A worker on a CPU answers from recorded steps what it answers without, and records all that kernels compute."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.cpu.recording import Recording, Sizes
from quire.compute.kernels.dispatch import KERNELS
from quire.models.lora.step_tiles import Adapted
from quire.offline import local_engine
from quire.runtime.worker.replay import RecordedSteps
from tests.adapters import make_adapter
from tests.checkpoints import VOCAB_SIZE, make_llama, make_tiny
from tests.executor.thread_ranks import ThreadRanks
from tests.models.divisible import DIVISIBLE
from tests.parity.cases import CASES
from tests.quantization import made
from tests.quantization.test_checkpoints import SHAPE, WEIGHT_ONLY, WITH_ACTIVATIONS

RECORDED = [
    "llama, 7 heads a group, biases, sharded",
    "qwen3, wide heads",
    "phi3",
    "gemma2",
    "gemma3",
    "gpt2",
    "mixtral",
    "qwen3 moe",
    "dynamic rope",
    "longrope, phi3, 4.x",
    "longrope, llama",
    "glm, interleaved pairs in a part of each head",
    "cohere, layer norms of heads",
    "olmo, clipped queries, keys and values",
    "olmo2, norms of whole queries and keys",
    "hunyuan, norms behind the rotation",
    "ministral3, queries scaled by their positions",
    "qwen2 moe, a gated shared expert",
    "glm4 moe, groups and a correction",
    "bloom, scores that fall with the distance",
    "laguna, a softplus gate of each head",
]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02, "logprobs": 2},
    {"temperature": 0.0, "presence_penalty": 1.5, "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def answers(
    directory: Path, monkeypatch: pytest.MonkeyPatch, adapters: Sequence[LoRARequest | None] = (None,), **settings: Any
) -> tuple[list[Any], int]:
    """Of a crowd of requests, to which adapters are dealt in turn; and how many steps were replayed."""
    replayed: list[object] = []
    replay = RecordedSteps.replay
    monkeypatch.setattr(RecordedSteps, "replay", lambda *of, **kind: (replayed.append(of), replay(*of, **kind))[1])
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 5, 30, 90)))] for _ in range(15)]
    params = [
        SamplingParams(**ASKED[i % len(ASKED)], seed=i, max_tokens=rng.randint(1, 30), ignore_eos=True)
        for i in range(15)
    ]
    settings = {"dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 40} | settings
    with LLM(str(directory), skip_tokenizer_init=True, **settings) as llm:
        wanted = [adapters[i % len(adapters)] for i in range(15)]
        outputs = llm.generate(prompts, params, lora_request=wanted)
    monkeypatch.undo()
    found = [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]
    return found, len(replayed)


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_steps_answer_the_same(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("there are no kernels on this machine")
    directory = make_tiny(tmp_path, **CASES[case])
    eager, none = answers(directory, monkeypatch, enforce_eager=True)
    recorded, steps = answers(directory, monkeypatch)
    assert none == 0
    assert steps > 30
    assert recorded == eager


def test_routers_in_fp32_are_recorded_among_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("there are no kernels on this machine")
    directory = make_tiny(tmp_path, **CASES["glm4 moe, groups and a correction"])
    eager, _ = answers(directory, monkeypatch, dtype="bfloat16", enforce_eager=True)
    recorded, steps = answers(directory, monkeypatch, dtype="bfloat16")
    assert steps > 30
    assert recorded == eager


@pytest.mark.parametrize(
    "case", ["qwen3, wide heads", "phi3", "gemma2", "qwen3 moe", "olmo2, norms of whole queries and keys"]
)
def test_steps_with_adapters_are_recorded(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("there are no kernels on this machine")
    directory = make_tiny(tmp_path / "model", **CASES[case])
    modules = ("qkv_proj", "gate_up_proj") if case == "phi3" else ("q_proj", "v_proj", "o_proj")
    paths = [make_adapter(tmp_path / f"{rank}", directory, rank, modules, seed=rank) for rank in (1, 6, 24)]
    adapters = [None, *(LoRARequest(path.name, 1, str(path)) for path in paths)]
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 24}
    eager, none = answers(directory, monkeypatch, adapters, enforce_eager=True, **settings)
    recorded, steps = answers(directory, monkeypatch, adapters, **settings)
    assert none == 0
    assert steps > 30
    assert recorded == eager
    alone, _ = answers(directory, monkeypatch)
    assert recorded[::4] == alone[::4]
    assert all(recorded[first::4] != alone[first::4] for first in (1, 2, 3))


def test_an_engine_that_serves_adapters_calls_for_others_what_one_without_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recording of steps without adapters has the same calls."""
    if library() is None:
        pytest.skip("there are no kernels on this machine")
    directory, calls = make_tiny(tmp_path, **CASES["phi3"]), []
    make = RecordedSteps.__init__

    def noted(self: RecordedSteps, recordings: dict[Adapted, Recording], most: Sizes) -> None:
        calls.append({adapted: each._entries.tolist() for adapted, each in recordings.items()})
        make(self, recordings, most)

    for settings in ({}, {"enable_lora": True}):
        monkeypatch.setattr(RecordedSteps, "__init__", noted)
        answers(directory, monkeypatch, **settings)
    without, serving = calls
    assert without.keys() == {Adapted.NOTHING}
    assert serving[Adapted.NOTHING] == without[Adapted.NOTHING]
    assert len(serving[Adapted.PROJECTIONS]) > len(without[Adapted.NOTHING])


@pytest.mark.parametrize(("case", "whole_experts"), [("qwen2, tied", False), ("mixtral", True)])
def test_steps_of_ranks_are_recorded_with_their_collectives(
    case: str, whole_experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny(tmp_path, **DIVISIBLE[case])
    one, _ = answers(directory, monkeypatch)
    monkeypatch.setattr(local_engine, "build_executor", ThreadRanks)
    two, steps = answers(directory, monkeypatch, tensor_parallel_size=2, enable_expert_parallel=whole_experts)
    assert steps > 60, "in each rank"
    assert [tokens for tokens, *_ in two] == [tokens for tokens, *_ in one]


def test_what_torch_computes_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("there are no kernels on this machine")
    directory = make_tiny(tmp_path, **CASES["phi3"])
    recorded, steps = answers(directory, monkeypatch)
    assert steps
    monkeypatch.setitem(KERNELS, ("rms_norm", "cpu"), "quire.compute.kernels.reference.norm:rms_norm")
    with pytest.MonkeyPatch.context() as other:
        eager, none = answers(directory, other)
    assert none == 0
    assert [tokens for tokens, *_ in eager] == [tokens for tokens, *_ in recorded]


@pytest.mark.parametrize("case", ["gptq, zeros", "int8, channels", "fp8, channels"])
def test_steps_of_quantized_models_are_recorded(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("there are no kernels of our own")
    config, make = (WEIGHT_ONLY | WITH_ACTIVATIONS)[case]
    directory = make_llama(tmp_path / "model", **SHAPE)
    made.quantize(directory, config, make)
    found, replayed = answers(directory, monkeypatch)
    assert replayed > 10
    assert answers(directory, monkeypatch, enforce_eager=True) == (found, 0)
