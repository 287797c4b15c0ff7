"""Every architecture and rotary scaling against transformers, through LLM: fp32, greedy, 64 tokens, logprobs.

Each token must be the likeliest in one pass of transformers over prompt and answer, which is what greedy generation
means; the beginning of one answer a checkpoint is generated for good.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.models.spec import read_spec
from tests.checkpoints import VOCAB_SIZE, make_tiny
from tests.parity.cases import CASES
from tests.parity.oracle import Oracle

TOKENS = 64
GENERATED = 16
"""Of these, those that transformers generates one by one: that takes as long as all else."""
CHUNK = 16
"""Tokens a step where blocks are few."""
LENGTHS = (3, 37, 90, 58)
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
SEEDED: dict[str, Any] = {"temperature": 1.1, "seed": 11, "max_tokens": 12, "ignore_eos": True}
SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 8, "skip_tokenizer_init": True}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]


def assert_greedy(reference: Oracle, prompt: list[int], choice: Any) -> None:
    """Every token is the likeliest after what stands before it, with transformers' log probability."""
    tokens = list(choice.token_ids)
    rows = reference.after(prompt, tokens)
    assert len(tokens) == TOKENS
    assert rows.argmax(-1).tolist() == tokens
    for row, entries in zip(rows, choice.logprobs, strict=True):
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    assert_parity(make_tiny(tmp_path, **CASES[case]))


def assert_parity(directory: Path, read_by_transformers: Path | None = None) -> None:
    """The checkpoint's answers are transformers', on cached prefixes, in several choices and through preemption too.

    transformers may read another checkpoint that computes the same.
    """
    reference, batch = Oracle(read_by_transformers or directory), prompts()
    keeps_states = bool(read_spec(directory).state_layers)
    often: dict[str, Any] = {"mamba_block_size": 8} if keeps_states else {}
    with LLM(str(directory), max_num_batched_tokens=40, **often, **SETTINGS) as llm:
        outputs = llm.generate(batch, GREEDY)
        for prompt, output in zip(batch, outputs, strict=True):
            assert_greedy(reference, prompt, output.outputs[0])
        greedy = [list(output.outputs[0].token_ids) for output in outputs]
        assert greedy[1][:GENERATED] == reference.greedy(batch[1], GENERATED)[0]
        again(llm, reference, batch, greedy)
        several = llm.generate([batch[1]], SamplingParams(n=3, **SEEDED))[0].outputs
        one = llm.generate([batch[1]], SamplingParams(**SEEDED))[0].outputs
        assert several[0].token_ids == one[0].token_ids
        assert len({tuple(choice.token_ids) for choice in several}) == 3
        counts = llm._engine.counts()
        assert counts["free_blocks"] == counts["blocks"]
    preempted(directory, batch, greedy)


def again(llm: LLM, reference: Oracle, batch: list[list[int]], greedy: list[list[int]]) -> None:
    """The same prompt, and another that begins like it, on cached blocks."""
    longer = batch[2][:80] + batch[3][:10]
    receive = llm._engine.receive
    cached: list[int] = []

    def listen(timeout: float | None) -> Any:
        message = receive(timeout)
        cached.extend(end.cached_tokens for end in getattr(message, "ends", []))
        return message

    llm._engine.receive = listen  # type: ignore[method-assign]
    same, other = llm.generate([batch[2], longer], GREEDY)
    llm._engine.receive = receive  # type: ignore[method-assign]
    assert sorted(cached) == [80, 88]
    assert list(same.outputs[0].token_ids) == greedy[2]
    assert_greedy(reference, longer, other.outputs[0])


def preempted(directory: Path, batch: list[list[int]], greedy: list[list[int]]) -> None:
    """The same tokens on so few blocks that sequences are preempted, in both modes."""
    reaches = read_spec(directory).kv_groups()
    for_one = sum(reach.max_blocks(max(LENGTHS) + TOKENS, CHUNK, SETTINGS["block_size"]) for reach in reaches)
    for mode in ("recompute", "swap"):
        few: dict[str, Any] = {"num_gpu_blocks_override": for_one + 3, "preemption_mode": mode, "swap_space": 0.01}
        few |= {"max_model_len": "auto"}
        with LLM(str(directory), max_num_batched_tokens=CHUNK, **few, **SETTINGS) as llm:
            outputs = llm.generate(batch, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
            assert [list(output.outputs[0].token_ids) for output in outputs] == greedy
            assert llm._engine.counts()["preemptions"] > 0 or not reaches  # no blocks, none are missing
