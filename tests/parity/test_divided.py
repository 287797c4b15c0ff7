"""Every family over one, two and four ranks through LLM: the same tokens in every way that an engine takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.models.spec import read_spec
from quire.offline import local_engine
from tests.checkpoints import make_tiny
from tests.executor.thread_ranks import ThreadRanks
from tests.models.divisible import DIVISIBLE
from tests.parity.oracle import Oracle

pytestmark = pytest.mark.long("many cards")

TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=1.1, seed=11, max_tokens=12, ignore_eos=True, n=3, repetition_penalty=1.2)
SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 8, "skip_tokenizer_init": True, "max_model_len": 128}
LENGTHS = (3, 37, 70, 50)
CHUNK = 16
MODES = ("recompute", "swap")
WITH_EXPERTS = [
    case for case, shape in DIVISIBLE.items() if shape.keys() & {"num_experts", "num_local_experts", "n_routed_experts"}
]


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 320) for _ in range(n)] for n in LENGTHS]


def answers(
    directory: Path,
    ranks: dict[str, Any],
    modes: tuple[str, ...] = MODES,
    load: Callable[..., AbstractContextManager[LLM]] = LLM,
) -> dict[str, Any]:
    """In chunks, on cached blocks, for several sequences of a prompt, with prompt log probabilities, and on so few
    blocks that sequences are preempted in these modes."""
    batch, found = prompts(), dict[str, Any]()
    settings = SETTINGS | ranks
    with load(str(directory), max_num_batched_tokens=40, **settings) as llm:
        found["greedy"] = tokens_and_logprobs(llm.generate(batch, GREEDY))
        found["cached"] = tokens_and_logprobs(llm.generate([batch[2], batch[2][:60] + batch[1][:9]], GREEDY))
        found["several"] = [list(choice.token_ids) for choice in llm.generate([batch[1]], SEEDED)[0].outputs]
        scored = llm.generate([batch[1]], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))[0]
        found["prompt"] = [
            [entry.logprob for _, entry in sorted((entries or {}).items())] for entries in scored.prompt_logprobs or []
        ]
        counts = llm._engine.counts()
        assert counts["free_blocks"] == counts["blocks"]
    reaches = read_spec(directory).kv_groups()
    for_one = sum(reach.max_blocks(max(LENGTHS) + TOKENS, CHUNK, SETTINGS["block_size"]) for reach in reaches)
    for mode in modes:
        few = {"num_gpu_blocks_override": for_one + 2, "preemption_mode": mode, "swap_space": 0.01}
        few |= {"max_model_len": "auto"}
        with load(str(directory), max_num_batched_tokens=CHUNK, **few | settings) as llm:
            assert [out[0] for out in tokens_and_logprobs(llm.generate(batch, GREEDY))] == [
                out[0] for out in found["greedy"]
            ]
            assert llm._engine.counts()["preemptions"] > 0
    return found


def tokens_and_logprobs(outputs: list[Any]) -> list[tuple[list[int], list[float]]]:
    choices = [output.outputs[0] for output in outputs]
    return [(list(c.token_ids), [e[t].logprob for t, e in zip(c.token_ids, c.logprobs, strict=True)]) for c in choices]


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """The checkpoint of a case, and what one rank answers, which transformers says too."""

    @cache
    def of(case: str) -> tuple[Path, dict[str, Any]]:
        torch.set_num_threads(1)
        directory = make_tiny(tmp_path_factory.mktemp("divided"), **{"num_hidden_layers": 3} | DIVISIBLE[case])
        one = answers(directory, {}, ())  # test_architectures.py has one rank preempted
        assert one["greedy"][1][0] == Oracle(directory).greedy(prompts()[1], TOKENS)[0]
        return directory, one

    return of


def divided(tp: int, pp: int) -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}


@pytest.mark.parametrize(
    ("tp", "pp", "modes"),
    [
        (2, 1, MODES[:1]),
        (4, 1, ()),
        (1, 3, MODES[1:]),
        (2, 2, ()),
    ],
)
@pytest.mark.parametrize("case", DIVISIBLE)
def test_ranks_say_what_one_says(
    case: str,
    tp: int,
    pp: int,
    modes: tuple[str, ...],
    undivided: Callable[[str], tuple[Path, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, one = undivided(case)
    monkeypatch.setattr(local_engine, "build_executor", ThreadRanks)
    check_same(answers(directory, divided(tp, pp), modes), one)


@pytest.mark.parametrize(
    ("tp", "pp", "modes"),
    [
        (4, 1, MODES[1:]),
        (2, 2, MODES[:1]),
    ],
)
@pytest.mark.parametrize("case", WITH_EXPERTS)
def test_ranks_with_whole_experts_say_what_one_says(
    case: str,
    tp: int,
    pp: int,
    modes: tuple[str, ...],
    undivided: Callable[[str], tuple[Path, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of numbers of experts that ranks cannot divide evenly."""
    directory, one = undivided(case)
    monkeypatch.setattr(local_engine, "build_executor", ThreadRanks)
    check_same(answers(directory, divided(tp, pp) | {"enable_expert_parallel": True}, modes), one)


def check_same(several: dict[str, Any], one: dict[str, Any]) -> None:
    """Tokens are; log probabilities nearly."""
    for key in ("greedy", "cached"):
        for (tokens, logprobs), (expected, exact) in zip(several[key], one[key], strict=True):
            assert tokens == expected, key
            assert logprobs == pytest.approx(exact, abs=1e-3)
    assert several["several"] == one["several"]
    for scores, exact in zip(several["prompt"], one["prompt"], strict=True):
        assert scores == pytest.approx(exact, abs=1e-3)


def test_ranks_find_and_verify_the_same_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    directory = make_tiny(tmp_path, **DIVISIBLE["llama, biases"])
    looping = [[5, 6, 7, 8] * 6 + [5, 6], [9, 10] * 12, prompts()[1]]
    with LLM(str(directory), **SETTINGS) as llm:
        expected = tokens_and_logprobs(llm.generate(looping, GREEDY))
    monkeypatch.setattr(local_engine, "build_executor", ThreadRanks)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with LLM(str(directory), tensor_parallel_size=2, speculative_config=drafts, **SETTINGS) as llm:
        found = tokens_and_logprobs(llm.generate(looping, GREEDY))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
