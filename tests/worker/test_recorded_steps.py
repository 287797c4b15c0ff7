"""A worker on a CPU answers from recorded steps what it answers without, and records all that kernels compute."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.kernels.cpu.library import library
from quire.kernels.dispatch import KERNELS
from quire.worker.recorded_steps import RecordedSteps
from tests.checkpoints import VOCAB_SIZE, make_tiny
from tests.parity.cases import CASES

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
]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02, "logprobs": 2},
    {"temperature": 0.0, "presence_penalty": 1.5, "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def answers(directory: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[Any], int]:
    """Of a crowd of requests; and how many steps were replayed."""
    replayed: list[object] = []
    replay = RecordedSteps.replay
    monkeypatch.setattr(RecordedSteps, "replay", lambda self, shape: (replayed.append(shape), replay(self, shape))[1])
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 5, 30, 90)))] for _ in range(15)]
    params = [
        SamplingParams(**ASKED[i % len(ASKED)], seed=i, max_tokens=rng.randint(1, 30), ignore_eos=True)
        for i in range(15)
    ]
    with LLM(
        str(directory), dtype="float32", skip_tokenizer_init=True, max_num_seqs=6, max_num_batched_tokens=40, **settings
    ) as llm:
        outputs = llm.generate(prompts, params)
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


def test_what_torch_computes_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("there are no kernels on this machine")
    directory = make_tiny(tmp_path, **CASES["phi3"])
    recorded, steps = answers(directory, monkeypatch)
    assert steps
    monkeypatch.setitem(KERNELS, ("rms_norm", "cpu"), "quire.kernels.reference.norm:rms_norm")
    with pytest.MonkeyPatch.context() as other:
        eager, none = answers(directory, other)
    assert none == 0
    assert [tokens for tokens, *_ in eager] == [tokens for tokens, *_ in recorded]
