"""Greedy answers of the shipped Quill to 500 questions of its examination, in fp32: whatever proposes drafts, they are
those without, token for token, with preemption and a cached prefix.

Should a step of several tokens ever add up to another greedy token than one of a single token, compare both logits
before calling it rounding; none of the 500 does.
"""

from __future__ import annotations

from typing import Any

import pytest
from quill.examination import examination

from quire import LLM, SamplingParams
from quire.engine.metrics.reader import Counter

pytestmark = [pytest.mark.long("engine"), pytest.mark.usefixtures("always_drafting")]
QUESTIONS = 500
ROWS = 25
"""Asked at once: as many as run, since there are no drafts while others wait."""
LIMITS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 1024, "max_num_seqs": ROWS, "block_size": 16, "num_gpu_blocks_override": 110,
    "swap_space": 0, "disable_log_stats": False,
}  # fmt: skip
"""So few blocks that sequences are preempted, and computed again."""
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
    "draft_model": {"model": "quill_draft", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "model": "quill_eagle3", "num_speculative_tokens": 4},
}
SYSTEM = {
    "role": "system",
    "content": "You are Quill, a small model that answers briefly. Say what is asked for and nothing else. If you do "
    "not know an answer, say that you do not know it. Be polite, be exact, and write plain words.",
}


@pytest.fixture(scope="module")
def conversations() -> list[list[dict[str, str]]]:
    """All tasks but `recall`, whose prompts are longer than all others together; with a common beginning."""
    asked = []
    for sample in examination(600):
        messages = [{"role": each.role, "content": each.content} for each in sample.question]
        if sample.task != "recall":
            asked.append(messages if messages[0]["role"] == "system" else [SYSTEM, *messages])
    assert len(asked) >= QUESTIONS
    return asked[:QUESTIONS]


def answers(conversations: list[list[dict[str, str]]], **asked: Any) -> tuple[list[list[int]], dict[str, float]]:
    """The tokens of each answer, and the engine's counters."""
    params, found = SamplingParams(temperature=0, max_tokens=32, detokenize=False), list[list[int]]()
    with LLM("quill", **asked, **LIMITS) as llm:
        for first in range(0, QUESTIONS, ROWS):
            outputs = llm.chat(conversations[first : first + ROWS], params, use_tqdm=False)
            found += [list(output.outputs[0].token_ids) for output in outputs]
        counters = {each.name: each.value for each in llm.get_metrics() if isinstance(each, Counter)}
    assert counters["vllm:num_preemptions"] > 0
    assert counters["vllm:prefix_cache_hits"] > 10_000
    return found, counters


@pytest.fixture(scope="module")
def expected(conversations: list[list[dict[str, str]]]) -> list[list[int]]:
    """Without drafts."""
    return answers(conversations)[0]


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_without_drafts(
    method: str, conversations: list[list[dict[str, str]]], expected: list[list[int]]
) -> None:
    found, counters = answers(conversations, speculative_config=METHODS[method])
    different = [number for number in range(QUESTIONS) if found[number] != expected[number]]
    assert not different
    drafts = counters["vllm:spec_decode_num_draft_tokens"]
    assert drafts > 2_000
    assert counters["vllm:spec_decode_num_accepted_tokens"] > 0.1 * drafts
