"""A card that serves is never waited for by a launch, and gives no new memory once every kind of request was there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.step_handle import StepHandle
from quire.runtime.worker.worker import Worker
from tests.checkpoints import make_llama

pytestmark = pytest.mark.gpu
VOCABULARY = 1_500
STEPS = 200
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3},
    "whole distribution": {"temperature": 1.0, "seed": 4},
    "min_p": {"temperature": 1.2, "min_p": 0.05, "seed": 5},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "log probabilities": {"temperature": 0.0, "logprobs": 5},
    "named log probabilities": {"temperature": 0.0, "logprob_token_ids": [3, 9]},
    "biases": {"temperature": 0.0, "logit_bias": {7: 2.0}},
    "allowed": {"temperature": 0.7, "allowed_token_ids": [5, 6, 7, 8]},
    "min_tokens": {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": [11]},
    "choices": {"temperature": 1.0, "n": 3, "seed": 6},
}


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    shape = {"hidden": 256, "intermediate": 512, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64}
    directory = make_llama(tmp_path, **shape, max_len=4_096, vocab_size=VOCABULARY, dtype="bfloat16", tokenizer=False)
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 1_024, "num_gpu_blocks_override": 2_000}
    with LLM(str(directory), device="cuda", dtype="bfloat16", skip_tokenizer_init=True, **settings) as llm:
        yield llm


def prompt(tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(tokens)]


def params(max_tokens: int, **kind: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kind)


def everything(llm: LLM, seed: int) -> None:
    """Each kind alone and all together, by prompts of a token, of several chunks, and that are cached."""
    for number, kind in enumerate(KINDS.values()):
        llm.generate([prompt(30 + number, seed + number)], params(12, **kind), use_tqdm=False)
    lengths = [1, 17, 700, 1_500, 128, 129, 3, 40, 512, 16, 33]
    prompts = [prompt(length, seed + 100 + length) for length in lengths]
    both = [params(20, **kind) for kind in KINDS.values()]
    for _ in range(2):
        llm.generate(prompts, both, use_tqdm=False)


def test_no_launch_waits_for_the_card(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    everything(llm, 1)  # what is done once may wait
    launch, launches = Worker.launch, []

    def strictly(self: Worker, plan: Plan) -> StepHandle:
        launches.append(plan.step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(self, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Worker, "launch", strictly)
    everything(llm, 2)
    assert len(launches) > 100


def test_serving_takes_no_new_memory(llm: LLM) -> None:
    """Soon: how much pinned memory is on its way at a time depends on the card's pace, so some rounds may find more."""
    decode = params(STEPS, temperature=0.0)

    def serve(seed: int) -> dict[str, int]:
        everything(llm, seed)
        llm.generate([prompt(20, seed + i) for i in range(16)], decode, use_tqdm=False)
        return memory()

    taken = [serve(1_000 * number) for number in range(1, 8)]
    assert taken[-1] == taken[-2] == taken[-3]
    on_device = [{name: count for name, count in each.items() if name != "num_host_alloc"} for each in taken]
    assert all(each == on_device[1] for each in on_device[2:])


def memory() -> dict[str, int]:
    """How often the device and the host were asked for memory, and what of it is kept."""
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    names = ("num_device_alloc", "num_device_free", "segment.all.allocated", "reserved_bytes.all.current")
    return {name: device[name] for name in names} | {"num_host_alloc": host["num_host_alloc"]}
