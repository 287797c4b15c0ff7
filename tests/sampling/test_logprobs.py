"""Log probabilities of prompts and outputs against transformers: chunked, cached, forked, preempted, in every mode."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.outputs import Logprob, RequestOutput
from quire.runtime.worker.sampling import logprobs
from tests.checkpoints import VOCAB_SIZE, make_llama
from tests.reference import Reference


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=2, std=0.12)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Any:
    with LLM(str(checkpoint), dtype="float32", block_size=8, max_logprobs=-1) as llm:
        yield llm


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(3, VOCAB_SIZE) for _ in range(60)]
    return [stem + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def assert_entry(found: dict[int, Logprob], token: int, row: list[float], k: int) -> None:
    """`found` has the token and the k likeliest of `row`, with their ranks."""
    order = sorted(range(len(row)), key=lambda t: -row[t])
    assert next(iter(found)) == token
    assert len(found) in (k, k + 1)
    assert found[token].rank == 1 + sum(value > row[token] for value in row)
    for candidate, entry in found.items():
        assert entry.logprob == pytest.approx(row[candidate], abs=1e-3)
        assert entry.decoded_token is not None
        if candidate != token:
            assert entry.rank is not None
            assert row[order[entry.rank - 1]] == pytest.approx(row[candidate], abs=1e-3)


def assert_prompt(reference: Reference, prompt: list[int], output: RequestOutput, k: int) -> None:
    rows, found = reference.logprobs(prompt), output.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for at, entry in enumerate(found[1:], start=1):
        assert entry is not None
        assert_entry(entry, prompt[at], rows[at - 1], k)


SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in chunks": {"max_num_batched_tokens": 13},
    "preempted, recomputed": {
        "max_model_len": "auto",
        "num_gpu_blocks_override": 26,
        "preemption_mode": "recompute",
        "swap_space": 0,
    },
    "preempted, swapped": {"max_model_len": "auto", "num_gpu_blocks_override": 26, "preemption_mode": "swap"},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_prompts_are_scored_as_by_transformers(
    checkpoint: Path, reference: Reference, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ask and some do not, some several times, beginnings are cached, and logits come three rows at a time."""
    monkeypatch.setattr(logprobs, "SORTED_LOGITS", 3 * VOCAB_SIZE)
    batch = prompts(6)
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, seed=i, prompt_logprobs=(None, 0, 3)[i % 3], n=1 + i % 2)
        for i in range(6)
    ]
    with LLM(str(checkpoint), dtype="float32", **{"block_size": 8, "swap_space": 0.01} | SETTINGS[settings]) as llm:
        llm.generate(batch[:2], SamplingParams(max_tokens=1))
        for _ in range(2):
            outputs = llm.generate(batch, params)
            for prompt, asked, output in zip(batch, params, outputs, strict=True):
                if asked.prompt_logprobs is None:
                    assert output.prompt_logprobs is None
                else:
                    assert_prompt(reference, prompt, output, asked.prompt_logprobs)
        assert (llm._engine.counts()["preemptions"] > 0) == settings.startswith("preempted")


def test_scored_prompts_read_no_cache_but_fill_it(llm: LLM, reference: Reference) -> None:
    prompt = prompts(1, seed=5)[0]
    ask = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    first, second = (llm.generate([prompt], ask)[0] for _ in range(2))
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert first.prompt_logprobs == second.prompt_logprobs
    assert llm.generate([prompt], SamplingParams(max_tokens=2))[0].num_cached_tokens >= 56
    skipping = SamplingParams(max_tokens=2, skip_reading_prefix_cache=True)
    assert llm.generate([prompt], skipping)[0].num_cached_tokens == 0


def test_a_prompt_of_one_token_has_nothing_before_it(llm: LLM) -> None:
    assert llm.generate([[5]], SamplingParams(max_tokens=2, prompt_logprobs=2))[0].prompt_logprobs == [None]


def test_the_whole_vocabulary(llm: LLM, reference: Reference) -> None:
    prompt = prompts(1, seed=6)[0]
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
    output = llm.generate([prompt], params)[0]
    assert_prompt(reference, prompt, output, VOCAB_SIZE)
    entries = output.outputs[0].logprobs
    assert entries is not None
    rows = reference.logprobs(prompt + output.outputs[0].token_ids)[len(prompt) - 1 :]
    for token, found, row in zip(output.outputs[0].token_ids, entries, rows, strict=False):
        assert_entry(found, token, row, VOCAB_SIZE)


def test_named_tokens(llm: LLM, reference: Reference) -> None:
    prompt = prompts(1, seed=7)[0]
    params = SamplingParams(max_tokens=4, temperature=0, logprob_token_ids=[300, 5, 9], ignore_eos=True)
    choice = llm.generate([prompt], params)[0].outputs[0]
    rows = reference.logprobs(prompt + choice.token_ids)[len(prompt) - 1 :]
    assert choice.logprobs is not None
    for token, found, row in zip(choice.token_ids, choice.logprobs, rows, strict=False):
        assert list(found) == [token, *(t for t in (300, 5, 9) if t != token)]
        for named, entry in found.items():
            assert entry.logprob == pytest.approx(row[named], abs=1e-3)
            assert entry.rank == (1 if named == token else None)


MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


@pytest.mark.parametrize("mode", MODES)
def test_modes(checkpoint: Path, reference: Reference, mode: str) -> None:
    """Greedy rows are processed by the rules alone, random ones by temperature and filters too; raw is raw."""
    prompt = prompts(1, seed=8)[0]
    bias = {"logit_bias": {7: 3.0}, "ignore_eos": True, "max_tokens": 1, "logprobs": 20}
    both = [SamplingParams(temperature=0, **bias), SamplingParams(temperature=0.5, top_k=3, seed=1, **bias)]  # type: ignore[arg-type]
    with LLM(str(checkpoint), dtype="float32", logprobs_mode=mode) as llm:
        outputs = llm.generate([prompt, prompt], both)
        assert [llm.generate([prompt], params)[0].outputs for params in both] == [o.outputs for o in outputs]
    raw = reference.logits(prompt)[-1]
    ruled = [x + 3.0 * (token == 7) for token, x in enumerate(raw)]
    best = sorted(range(VOCAB_SIZE), key=lambda t: -ruled[t])[:3]
    cut = [x / 0.5 if token in best else -math.inf for token, x in enumerate(ruled)]
    for output, processed in zip(outputs, (ruled, cut), strict=True):
        values = processed if mode.startswith("processed") else raw
        if mode.endswith("logprobs"):
            top = max(values)
            norm = top + math.log(sum(math.exp(x - top) for x in values))
            values = [x - norm for x in values]
        assert output.outputs[0].logprobs is not None
        for token, entry in output.outputs[0].logprobs[0].items():
            assert entry.logprob == pytest.approx(values[token], abs=1e-3)


def test_limits_are_the_engines(checkpoint: Path) -> None:
    with LLM(str(checkpoint), dtype="float32", max_logprobs=4) as llm:
        for wrong in ({"logprobs": 5}, {"logprobs": -1}, {"prompt_logprobs": 5}, {"prompt_logprobs": -1}):
            with pytest.raises(RequestError, match="must be at most 4 on this server"):
                llm.generate([[5, 6]], SamplingParams(**wrong))
        llm.generate([[5, 6]], SamplingParams(max_tokens=1, logprob_token_ids=[5] * 9))
    with pytest.raises(ConfigError, match="logprobs_mode: 'cooked' is not one of"):
        LLM(str(checkpoint), logprobs_mode="cooked")
