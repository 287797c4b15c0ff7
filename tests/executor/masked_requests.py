"""Requests under masks that ask for everything else as well, and what plain torch makes of transformers' logits."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from quire.compute.kernels.reference.philox import uniform
from quire.foundation.messages.to_engine import Add
from quire.runtime.executor.executor import Executor
from quire.sampling_params import SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.harness import Engine, HashMasker, add
from tests.reference import Reference
from tests.sampling.rules import likeliest, margin, ruled

TOKENS = 24
MASKED = {"masked": True}
TIE = 1e-4
WAIT = 0.05
CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"extra_args": None},
    {"temperature": 0.9, "top_k": 7},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "extra_args": None},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4, "temperature": 1.0},
    {"repetition_penalty": 1.4, "extra_args": None},
    {"logit_bias": {7: 4.0, 9: -100.0}, "logprobs": 2},
    {"allowed_token_ids": list(range(40, 140)), "temperature": 1.0},
    {"min_tokens": 9, "stop_ids": list(range(3, 60))},
    {"bad_words": [[t] for t in range(3, 90)] + [[100, 101]]},
    {"temperature": 1.0, "logprobs": 3},
]
"""Of `tests.engine.harness.add`; masked unless they say otherwise."""


def adds(seed: int = 0) -> list[Add]:
    """A request for each case, and a prompt with three sequences."""
    rng = random.Random(seed)
    requests = [
        add(number, [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))], TOKENS,
            **{"extra_args": MASKED} | case)
        for number, case in enumerate(CASES)
    ]  # fmt: skip
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(37)]
    several = add(100, prompt, TOKENS, forks=[101, 102], n=3, temperature=1.0, extra_args=MASKED)
    return [*requests, several]


def serve(reference: Reference, executor: Executor, settings: dict[str, Any], tie: float = TIE) -> Engine:
    """Serve all of them, and judge each token. The engine is still open, so that its executor can be looked at.

    Args:
        reference: The executor's checkpoint.
        executor: Not started yet.
        settings: Of the engine, as of the executor; with few blocks, requests are preempted.
        tie: See `assert_follows`.
    """
    masker = HashMasker(vocab_size=VOCAB_SIZE)
    limits = {"max_num_batched_tokens": 64} | settings
    engine = Engine(executor, masker=masker, drafts=None, wait=WAIT, **limits)
    requests = adds()
    outcome = engine.run(requests)
    for request in requests:
        for sequence in request.sequences():
            assert outcome.ends[sequence.id].reason in ("length", "stop"), outcome.ends[sequence.id]
            assert_follows(reference, sequence, outcome.tokens[sequence.id], tie)
    assert len({tuple(outcome.tokens[number]) for number in (100, 101, 102)}) == 3
    assert outcome.ends[12].reason == "stop"
    assert len(outcome.tokens[12]) >= 9
    assert (engine.client.counts()["preemptions"] > 0) == ("num_gpu_blocks_override" in settings)
    engine.assert_all_free()
    return engine


def assert_follows(reference: Reference, message: Add, output: list[int], tie: float = TIE) -> None:
    """Each token is what plain torch takes from transformers' logits, unless less than `tie` decides."""
    rows, sampling = reference.logits([*message.tokens, *output])[len(message.tokens) - 1 :], message.sampling
    for at, token in enumerate(output):
        known = [*message.tokens, *output[:at]]
        scores = ruled(
            rows[at], message.tokens, output[:at], sampling, message.bad_words,
            message.stop_ids if sampling.min_tokens else [],
        )  # fmt: skip
        if sampling.extra_args:
            bits = HashMasker.mask(known, VOCAB_SIZE)
            scores = [x if bits[t // 8] >> t % 8 & 1 else float("-inf") for t, x in enumerate(scores)]
            assert scores[token] > float("-inf"), "a token that the mask forbids"
        if sampling.greedy:
            assert token == likeliest(scores) or margin(scores) < tie, (sampling, at)
        else:
            exact = torch.tensor(scores, dtype=torch.float64)
            assert token in drawn(exact, sampling, message.seed, at, tie), (sampling, at)


def drawn(scores: Tensor, sampling: SamplingParams, seed: int, num_sampled: int, tie: float) -> set[int]:
    """The token that the request's random number chooses, and the one beside it where that is as near as `tie`."""
    x = scores / sampling.temperature
    x = x.masked_fill(x.softmax(-1) < sampling.min_p * x.softmax(-1).max(), float("-inf"))
    order = x.argsort(descending=True, stable=True)
    stays = torch.ones(len(x), dtype=torch.bool)
    if sampling.top_k > 0:
        stays &= torch.arange(len(x)) < sampling.top_k
    weights = x[order].softmax(-1) * stays
    weights /= weights.sum()
    stays &= weights.cumsum(-1) - weights < sampling.top_p
    kept = torch.zeros_like(x).index_put_((order[stays],), x.softmax(-1)[order[stays]])
    cumulative = kept.cumsum(-1) / kept.sum()
    number = float(uniform(torch.tensor([seed]), torch.tensor([num_sampled]))[0])
    return {
        int(torch.searchsorted(cumulative, number + near, right=True).clamp(max=len(x) - 1)) for near in (-tie, 0, tie)
    }
