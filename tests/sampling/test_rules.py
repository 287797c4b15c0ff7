"""Penalties, bias, bad words and allowed tokens against plain formulas on transformers' logits, in one mixed batch:
with chunks, prefix hits, forks and preemption in both modes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from quire.text.tokenizer import bad_word_tokens
from tests.checkpoints import IM_END_ID, VOCAB_SIZE, make_llama
from tests.reference import Reference
from tests.sampling.rules import likeliest, margin, ruled

TOKENS = 40
CASES: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 0.7},
    {"logit_bias": {7: 4.0, 9: -100.0, 300: 3.5}},
    {"allowed_token_ids": list(range(40, 90))},
    {"allowed_token_ids": [5, 6, 7], "logit_bias": {8: 100.0}, "frequency_penalty": 0.5},
    {"min_tokens": 25, "ignore_eos": False, "logit_bias": {IM_END_ID: 30.0}},
    {"bad_words": ["the", "quick brown", "a", "e", "x"], "repetition_penalty": 1.3},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=5, std=0.12)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Of many lengths, in pairs that begin alike."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, VOCAB_SIZE) for _ in range(45)]
    return [stem[: rng.randrange(0, 45)] + [rng.randrange(3, VOCAB_SIZE) for _ in range(9)] for _ in range(count)]


def follows(llm: LLM, reference: Reference, prompt: list[int], params: SamplingParams, output: list[int]) -> None:
    """Each greedy token is the likeliest of the plain formulas on transformers' logits."""
    rows = reference.logits(prompt + output)[len(prompt) - 1 :]
    words = bad_word_tokens(llm.get_tokenizer(), params.bad_words)
    stop_ids = [] if params.ignore_eos else [IM_END_ID]
    for at, token in enumerate(output):
        scores = ruled(rows[at], prompt, output[:at], params, words, stop_ids)
        assert token == likeliest(scores) or margin(scores) < 1e-4, (params, at)


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small chunks": {"max_num_batched_tokens": 24},
    "preempted, recomputed": {"max_model_len": "auto", "num_gpu_blocks_override": 22, "preemption_mode": "recompute"},
    "preempted, swapped": {"max_model_len": "auto", "num_gpu_blocks_override": 22, "preemption_mode": "swap"},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_rule_in_one_batch_follows_the_formulas(checkpoint: Path, reference: Reference, settings: str) -> None:
    params = [SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True} | case) for case in CASES]
    batch = prompts(len(params), seed=len(settings))
    with LLM(str(checkpoint), dtype="float32", **{"block_size": 8, "swap_space": 0.01} | SETTINGS[settings]) as llm:
        llm.generate(batch[:3], SamplingParams(temperature=0, max_tokens=2))  # something is cached
        outputs = llm.generate(batch, params)
        assert (llm._engine.counts()["preemptions"] > 0) == settings.startswith("preempted")
        for prompt, each, output in zip(batch, params, outputs, strict=True):
            follows(llm, reference, prompt, each, output.outputs[0].token_ids)
    assert {t for o in outputs[6:8] for t in o.outputs[0].token_ids} <= {5, 6, 7, *range(40, 90)}
    assert outputs[8].outputs[0].finish_reason == "stop"
    assert len(outputs[8].outputs[0].token_ids) == 26


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Any:
    with LLM(str(checkpoint), dtype="float32", block_size=8) as llm:
        yield llm


def test_bad_words_are_found_in_pieces(llm: LLM, reference: Reference) -> None:
    """A text that is drawn freely is forbidden word by word, so that sequences of several tokens matter."""
    prompt = prompts(1, seed=3)[0]
    free = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))[0].outputs[0]
    tokenizer = llm.get_tokenizer()
    words = []
    for length in (1, 2, 3, 5):
        for start in range(0, TOKENS - 5, 7):
            text = tokenizer.decode(free.token_ids[start : start + length])
            if "\ufffd" not in text and text.strip():
                words.append(text)
    assert any(len(tokens) > 2 for tokens in bad_word_tokens(tokenizer, words))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, bad_words=words)
    output = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert output != free.token_ids
    follows(llm, reference, prompt, params, output)


def test_rules_shape_random_draws_too(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, allowed_token_ids=[9, 10, 11],
                            logit_bias={10: -100.0}, presence_penalty=-2.0)  # fmt: skip
    for choice in llm.generate([[5, 6]], params)[0].outputs:
        assert set(choice.token_ids) == {9, 11}


def test_a_request_without_a_token_to_draw_fails_alone(llm: LLM) -> None:
    digits = StructuredOutputsParams(regex="[0-9]+")
    params = SamplingParams(max_tokens=4, allowed_token_ids=[IM_END_ID], structured_outputs=digits)
    with pytest.raises(RequestError, match="No token is left to draw"):
        llm.generate([[5, 6], [7, 8]], [SamplingParams(max_tokens=4), params])
    assert llm._engine.counts()["requests"] == 0


def test_a_slots_next_owner_has_a_clean_slate(checkpoint: Path, reference: Reference) -> None:
    """One slot: penalties, bans and biases of one request do not reach the next."""
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(checkpoint), dtype="float32", max_num_seqs=1, block_size=8) as llm:
        for case in CASES:
            asked = SamplingParams(**{"temperature": 0, "max_tokens": 26, "ignore_eos": True} | case)
            for params in (asked, plain):
                for prompt in prompts(1, seed=9):
                    follows(llm, reference, prompt, params, llm.generate([prompt], params)[0].outputs[0].token_ids)


def test_a_pattern_that_comes_again_and_again_ends_the_output(llm: LLM) -> None:
    detection = RepetitionDetectionParams(max_pattern_size=3, min_count=4)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, allowed_token_ids=[9],
                            repetition_detection=detection)  # fmt: skip
    choice = llm.generate([[5, 6]], params)[0].outputs[0]
    assert (choice.token_ids, choice.finish_reason) == ([9] * 4, "repetition")


def test_only_the_end_of_a_long_prompt_counts(llm: LLM) -> None:
    prompt = prompts(1, seed=1)[0]
    cut = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, truncate_prompt_tokens=4))[0]
    assert cut.prompt_token_ids == prompt[-4:]
    alone = llm.generate([prompt[-4:]], SamplingParams(temperature=0, max_tokens=8))[0]
    assert cut.outputs == alone.outputs
    most = llm.generate([prompt * 20], SamplingParams(temperature=0, max_tokens=8, truncate_prompt_tokens=-1))[0]
    assert len(most.prompt_token_ids) == 512 - 8
    with pytest.raises(RequestError, match="at most 512"):
        llm.generate([prompt], SamplingParams(truncate_prompt_tokens=513))
