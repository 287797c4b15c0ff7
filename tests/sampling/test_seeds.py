"""Same seed, same random numbers, same tokens in fp32, whatever else happens to the batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, make_llama

ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tiny chunks": {"max_num_batched_tokens": 11},
    "recomputing": {
        "max_model_len": "auto",
        "num_gpu_blocks_override": 15,
        "preemption_mode": "recompute",
        "swap_space": 0,
    },
    "swapping": {"max_model_len": "auto", "num_gpu_blocks_override": 15, "preemption_mode": "swap"},
    "without prefix cache": {"enable_prefix_caching": False},
    "few slots": {"max_num_seqs": 3},
}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.02},
    {"n": 3, "temperature": 0.9},
    {"frequency_penalty": 0.8, "repetition_penalty": 1.2},
    {"presence_penalty": 1.1, "logit_bias": {9: 5.0}},
    {"bad_words": ["the", "a b"], "min_tokens": 8},
    {"allowed_token_ids": list(range(50, 70)), "n": 2},
    {"logprobs": 2, "prompt_logprobs": 1},
]


def request(number: int) -> tuple[list[int], SamplingParams]:
    """Request `number` of all there are: many prompts begin alike."""
    rng = random.Random(number)
    stem = [random.Random(number % 3).randrange(3, VOCAB_SIZE)] * 30
    prompt = stem[: rng.choice([0, 9, 30])] + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
    asked = {"seed": number, "max_tokens": rng.randint(8, 30), "ignore_eos": number % 2 == 0}
    return prompt, SamplingParams(**asked | KINDS[number % len(KINDS)])


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = str(make_llama(tmp_path_factory.mktemp("llama") / "model", seed=4, std=0.12))
    made = {n: LLM(directory, dtype="float32", **{"block_size": 8, "swap_space": 0.01} | e) for n, e in ENGINES.items()}
    yield made
    for llm in made.values():
        llm.close()


@pytest.fixture(scope="module")
def alone(engines: dict[str, LLM]) -> dict[int, list[list[int]]]:
    """What each request gets when nothing else runs and nothing is cached."""
    found = {}
    for number in range(40):
        prompt, params = request(number)
        output = engines["without prefix cache"].generate([prompt], params)[0]
        found[number] = [choice.token_ids for choice in output.outputs]
    return found


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=8)
@given(numbers=st.lists(st.integers(0, 39), min_size=2, max_size=24))
def test_neighbours_change_nothing(
    engine: str, engines: dict[str, LLM], alone: dict[int, list[list[int]]], numbers: list[int]
) -> None:
    batch = [request(number) for number in numbers]
    outputs = engines[engine].generate([prompt for prompt, _ in batch], [params for _, params in batch])
    for number, output in zip(numbers, outputs, strict=True):
        assert [choice.token_ids for choice in output.outputs] == alone[number]


def test_the_engines_did_what_they_are_for(engines: dict[str, LLM]) -> None:
    """After the examples above: some were preempted, some found a prefix."""
    numbers = list(range(24))
    for name, llm in engines.items():
        llm.generate([request(n)[0] for n in numbers], [request(n)[1] for n in numbers])
        counts, tally = llm._engine.counts(), llm._engine._core._scheduler.stats
        assert (counts["preemptions"] > 0) == (name in ("recomputing", "swapping")), name
        assert tally.prefix_hits > 0, name  # forks are hits, too
        assert counts["free_blocks"] == counts["blocks"]
