"""Beam search against a plain search on transformers' logits, and against `generate` where both are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import RequestError
from quire.foundation.messages.workers import TokenLogprobs
from quire.outputs import BeamSearchSequence
from quire.text.beam_search import BeamSearch
from tests.checkpoints import IM_END_ID, make_llama
from tests.reference import Reference

PROMPTS = [[5, 6, 7], [100, 200, 300, 4, 9, 88, 17, 23, 42, 99, 256, 31], [77]]
Found = tuple[list[int], float]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small weights, so that an end of sequence is never far from likely."""
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, std=0.06)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Any:
    with LLM(str(checkpoint), dtype="float32", max_logprobs=320, block_size=8) as llm:
        yield llm


def plain_search(
    reference: Reference, prompt: list[int], params: BeamSearchParams, eos: int
) -> list[tuple[list[int], float, float]]:
    """vLLM's loop, word by word: (tokens without the end, log probability, score), best first, nothing cut short."""
    width = params.beam_width

    def score(tokens: list[int], logprob: float) -> float:
        return float(logprob / len(tokens) ** params.length_penalty)

    beams: list[Found] = [(prompt, 0.0)]
    complete: list[Found] = []
    for _ in range(params.max_tokens):
        extended: list[Found] = []
        for tokens, logprob in beams:
            row = reference.logprobs(tokens)[-1]
            for token in sorted(range(len(row)), key=lambda t: -row[t])[: 2 * width]:
                if token == eos and not params.ignore_eos:
                    complete.append((tokens, logprob + row[token]))
                else:
                    extended.append(([*tokens, token], logprob + row[token]))
        beams = sorted(extended, key=lambda beam: -score(*beam))[:width]
    found = sorted(complete + beams, key=lambda beam: -score(*beam))[:width]
    return [(tokens, logprob, score(tokens, logprob)) for tokens, logprob in found]


CASES: list[dict[str, Any]] = [
    {"beam_width": 1, "max_tokens": 8},
    {"beam_width": 3, "max_tokens": 7},
    {"beam_width": 4, "max_tokens": 6, "length_penalty": 0.0},
    {"beam_width": 4, "max_tokens": 6, "length_penalty": 2.5},
    {"beam_width": 3, "max_tokens": 5, "length_penalty": -1.0},
    {"beam_width": 3, "max_tokens": 6, "ignore_eos": True},
    {"beam_width": 128, "max_tokens": 1},
    {"beam_width": 2, "max_tokens": 1, "temperature": 0.7},
]


@pytest.mark.parametrize("eos", [IM_END_ID, None], ids=["model's end", "a likely end"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_finds_what_a_plain_search_finds(
    llm: LLM, reference: Reference, case: dict[str, Any], eos: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts at once; also with an end of sequence that comes early, as the model's own seldom does."""
    params = BeamSearchParams(**case)
    if eos is None:
        row = reference.logprobs(PROMPTS[0])[-1]
        eos = sorted(range(len(row)), key=lambda t: -row[t])[1]
    monkeypatch.setattr(llm, "_text", _with_end(llm, eos))
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = plain_search(reference, prompt, params, eos)
        assert len(output.sequences) == len(expected)
        for sequence, (tokens, logprob, _) in zip(output.sequences, expected, strict=True):
            assert sequence.cum_logprob == pytest.approx(logprob, abs=1e-3)
            assert sequence.tokens == tokens
            assert (sequence.finish_reason == "stop") == (sequence.stop_reason == eos)
            assert sequence.text == llm.get_tokenizer().decode(tokens)


def _with_end(llm: LLM, eos: int) -> Any:
    return replace(llm._text, eos_ids=(eos,))


def test_one_beam_is_greedy(llm: LLM) -> None:
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    beams = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=10, ignore_eos=True))
    for prompt, one, other in zip(PROMPTS, greedy, beams, strict=True):
        assert other.sequences[0].tokens == prompt + one.outputs[0].token_ids


def test_the_end_is_kept_if_asked_for(llm: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    row = reference.logprobs(PROMPTS[0])[-1]
    eos = row.index(max(row))
    monkeypatch.setattr(llm, "_text", _with_end(llm, eos))
    short: dict[str, Any] = {"beam_width": 2, "max_tokens": 4, "length_penalty": 0.0}
    bare, kept = (
        llm.beam_search(PROMPTS[:1], BeamSearchParams(**short, include_stop_str_in_output=keep))[0].sequences[0]
        for keep in (False, True)
    )
    assert (bare.tokens, kept.tokens) == (PROMPTS[0], [*PROMPTS[0], eos])
    assert bare.stop_reason == kept.stop_reason == eos


def test_beams_share_what_is_computed(llm: LLM) -> None:
    """Each step computes little more than one token a beam: what the steps before did is found."""
    prompt = [(7 * i) % 300 + 3 for i in range(200)]
    before = llm._engine._core._scheduler.stats.prefix_hits
    llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True))
    assert llm._engine._core._scheduler.stats.prefix_hits - before >= 36 * 196


def test_few_prompts_at_once_find_the_same(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    assert llm.beam_search(PROMPTS, params, concurrency_limit=1) == llm.beam_search(PROMPTS, params)


def test_what_cannot_be_searched_is_refused_before(llm: LLM, checkpoint: Path) -> None:
    with pytest.raises(RequestError, match="lower max_tokens to 509"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=510))
    for wrong in (
        {"beam_width": 0},
        {"beam_width": 129},
        {"max_tokens": 0},
        {"temperature": -1},
        {"length_penalty": float("nan")},
    ):
        with pytest.raises(RequestError):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | wrong)
    with (
        LLM(str(checkpoint), dtype="float32") as narrow,
        pytest.raises(RequestError, match="at most 10, half of max_logprobs"),
    ):
        narrow.beam_search(PROMPTS, BeamSearchParams(beam_width=11, max_tokens=2))


def test_nothing_better_is_missed_by_ending_early() -> None:
    """A live beam that can still win keeps the search going; one that cannot ends it."""
    for penalty, decided in ((0.0, True), (1.0, False)):
        search = BeamSearch([1], BeamSearchParams(beam_width=1, max_tokens=9, length_penalty=penalty), [0])
        search.extend([TokenLogprobs(-1.0, 1, [0, 5], [-1.0, -2.0])])
        assert search.done is decided
    search.extend([TokenLogprobs(-0.1, 1, [5, 0], [-0.1, -2.0])])
    assert search.result() == [BeamSearchSequence([1, 5, 5], -2.1, None, "length", None)]
