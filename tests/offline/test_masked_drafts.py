"""Drafts of sequences under a grammar: whatever guesses, the output is the one without, token for token."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.metrics.reader import Counter
from quire.engine.structured_output import grammar_masks
from quire.engine.structured_output.grammar_masks import GrammarMasks
from quire.engine.structured_output.mask_process import MaskProcess
from quire.foundation.messages.to_engine import Add
from quire.scheduling.speculation.ngram_index import NgramIndex

pytestmark = pytest.mark.usefixtures("always_drafting")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "milk"]}, "minItems": 2, "maxItems": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "likes", "age"],
    "additionalProperties": False,
}
LIMITS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "block_size": 8,
                          "num_gpu_blocks_override": 22, "disable_log_stats": False}  # fmt: skip
"""So few blocks that sequences are preempted."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
GRAMMARS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "(ab|cd){20,24}-[0-9]{2}"},
    {"choice": ["to the left of the house", "to the right of the house"]},
    {},
]
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.1, "top_p": 0.95, "seed": 5},
    "penalties, log probabilities": {"temperature": 0.7, "seed": 6, "presence_penalty": 0.6, "logprobs": 1},
    "min_tokens": {"temperature": 0, "min_tokens": 14},
}


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module", params=["the engine's process", "beside it"])
def guessing(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "beside it":
            patch.setattr(grammar_masks, "MAX_OWN_VOCAB", 0)
            patch.setattr(GrammarMasks, "prepare", prepare_and_wait)
        with LLM(speculative_config=NGRAM, **LIMITS) as llm:
            answers(llm, ASKED["greedy"])  # grammars are compiled now; else sequences begin when theirs happens to be
            yield llm


prepare = GrammarMasks.prepare


def prepare_and_wait(self: GrammarMasks, message: Add) -> bool:
    """Sequences that are followed beside begin at once: which guesses are made depends on who runs in a step."""
    ready = prepare(self, message)
    if not isinstance(self._maker, MaskProcess):
        return ready
    while not self._prepared:
        self._maker.poll()
        time.sleep(0.0005)
    self._prepared.clear()
    return True


def answers(llm: LLM, asked: dict[str, Any]) -> list[tuple[list[int], list[int], str | None]]:
    """Prompt, output and why it ended."""
    params = [
        SamplingParams(
            **{"max_tokens": 60} | asked, structured_outputs=StructuredOutputsParams(**grammar) if grammar else None
        )
        for grammar in GRAMMARS
    ] * 3
    prompts = [f"{number}. Tom is old. Tom likes tea, and" for number in range(len(params))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (list(each.prompt_token_ids or ()), each.outputs[0].token_ids, each.outputs[0].finish_reason)
        for each in outputs
    ]


def counters(llm: LLM) -> dict[str, float]:
    return {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}


@pytest.mark.parametrize("asked", ASKED)
def test_guesses_change_no_output_under_a_grammar(
    asked: str, plain: LLM, guessing: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses that are right up to the output's end, and then go on; that have a wrong token among them; and that the
    grammar forbids."""
    expected = answers(plain, ASKED[asked])
    assert {reason for _, _, reason in expected[:3]} == {"stop"}
    rng = random.Random(3)

    def propose(self: NgramIndex, most: int) -> list[int]:
        length = len(self.tokens)
        whole = next(
            (text for prompt, output, _ in expected if (text := [*prompt, *output])[:length] == self.tokens), []
        )
        found = [*whole[length:], *(rng.randrange(3, 4096) for _ in range(most))][:most]
        if rng.random() < 0.4:
            found[rng.randrange(most)] = rng.randrange(3, 4096)
        return found

    monkeypatch.setattr(NgramIndex, "propose", propose)
    before = counters(guessing)
    assert answers(guessing, ASKED[asked]) == expected
    after = counters(guessing)
    gained = {name: after[name] - before[name] for name in after}
    tokens = sum(len(output) for _, output, _ in expected)
    assert tokens / 10 < gained["vllm:spec_decode_num_accepted_tokens"] < gained["vllm:spec_decode_num_draft_tokens"]
    assert after["vllm:num_preemptions"] > 0
