"""Drafts in models whose layers keep states: whatever is rejected, answers are those without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.runtime.worker.speculation import draft_states
from tests.checkpoints import make_tiny, write_tokenizer
from tests.models_sweep.rows import ROWS, SHAPE
from tests.offline.test_eagle3 import counters
from tests.offline.test_speculation import ASKED, NGRAM, answers
from tests.offline.test_speculation import LIMITS as OTHER_LIMITS

pytestmark = pytest.mark.usefixtures("always_drafting")
LIMITS: dict[str, Any] = OTHER_LIMITS | {"mamba_block_size": 16, "num_states_override": 40}
GRAMMARS: list[dict[str, Any]] = [{"regex": "(ab|cd){12,14}-[0-9]{2}"}, {"regex": "[ab]{20}"}, {}]


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = SHAPE | ROWS["Lfm2ForCausalLM"] | {"vocab_size": 512}
    directory = make_tiny(tmp_path_factory.mktemp("lfm2"), "Lfm2ForCausalLM", **shape)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def expected(lfm2: Path) -> Iterator[Callable[[str], list[Any]]]:
    with LLM(str(lfm2), **LIMITS) as llm:
        yield cache(lambda asked: grammatical(llm) if asked == "grammars" else answers(llm, ASKED[asked]))


@pytest.fixture(scope="module")
def guessing(lfm2: Path) -> Iterator[LLM]:
    with LLM(str(lfm2), speculative_config=NGRAM, disable_log_stats=False, **LIMITS) as llm:
        yield llm


def grammatical(llm: LLM) -> list[tuple[int, ...]]:
    """Answers some of which follow a grammar, so that their rows wait for masks."""
    rng = random.Random(3)
    texts = ["".join(rng.choice("abcd") for _ in range(rng.randint(3, 30))) for _ in range(9)]
    params = [
        SamplingParams(
            temperature=0.7, seed=number, max_tokens=40,
            structured_outputs=StructuredOutputsParams(**own) if (own := GRAMMARS[number % 3]) else None,
        )
        for number in range(len(texts))
    ]  # fmt: skip
    return [tuple(each.outputs[0].token_ids) for each in llm.generate(texts, params, use_tqdm=False)]


@pytest.mark.parametrize("asked", [*ASKED, "grammars"])
def test_guessing_changes_no_output(asked: str, expected: Callable[[str], list[Any]], guessing: LLM) -> None:
    """With chunked prompts, a common prefix that is cached, and too few blocks for all."""
    before = counters(guessing)
    found = grammatical(guessing) if asked == "grammars" else answers(guessing, ASKED[asked])
    assert found == expected(asked)
    drafts, accepted = (
        counters(guessing)[name] - before[name]
        for name in ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    )
    assert drafts > accepted
    assert accepted > 0 or asked not in ("greedy", "choice", "grammars")


def test_a_draft_model_follows_the_layers_that_cache_tokens(
    lfm2: Path, expected: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    draft = make_tiny(tmp_path, "LlamaForCausalLM", **SHAPE | {"vocab_size": 512})
    write_tokenizer(draft)
    asked = {"model": str(draft), "num_speculative_tokens": 3}
    with LLM(str(lfm2), speculative_config=asked, disable_log_stats=False, **LIMITS) as llm:
        assert answers(llm, ASKED["greedy"]) == expected("greedy")
        assert counters(llm)["vllm:spec_decode_num_drafts"] > 0


@pytest.mark.parametrize("bug", ["kept", "rejected", "one more"])
def test_states_of_rejected_drafts_are_noticed(
    bug: str, lfm2: Path, expected: Callable[[str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No state moves; or the state that the whole row has made stays; or that of a token too many."""
    if bug == "kept":
        monkeypatch.setattr(draft_states.DraftStates, "_run", lambda *_: None)
    elif bug == "rejected":
        monkeypatch.setattr(draft_states, "_drafted", lambda step: draft_states._NO_ROWS)
    else:
        cuts = draft_states._cuts
        monkeypatch.setattr(draft_states, "_cuts", lambda marks, moved, end: cuts(marks, moved + 1, end + 1))
    with LLM(str(lfm2), speculative_config=NGRAM, **LIMITS) as llm:
        assert answers(llm, ASKED["greedy"]) != expected("greedy")
