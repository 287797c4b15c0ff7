"""10^5 draws each: what comes out follows what was asked for, to the last token that a filter keeps or cuts.

Chi-square at 1e-4 with fixed seeds, so it passes or fails for ever. Each case is also held against distributions that
are off by one token, which must be noticed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from quire.runtime.worker.sampling.sampled_outputs import errors_of
from quire.runtime.worker.sampling.sampler import sample_with_transforms
from quire.runtime.worker.slot_table import SlotTable
from tests.sampling.chi_square import critical, statistic
from tests.sampling.rules import ruled
from tests.worker.driver import admit, admitted

DRAWS = 100_000
ROWS = 5_000
VOCAB = 40
LEVEL = 1e-4
LOGITS: Tensor = torch.randn(VOCAB, generator=torch.Generator().manual_seed(6)) * 1.5

CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 12},
    {"top_k": VOCAB - 1},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.93},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 0.3},
    {"temperature": 1.5, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.1},
    {"top_k": 15, "top_p": 0.8},
    {"top_k": 15, "min_p": 0.05},
    {"top_p": 0.85, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 18, "top_p": 0.9, "min_p": 0.03},
    {"temperature": 0.8, "top_k": 10, "top_p": 0.95, "min_p": 0.01},
]


def expected(logits: list[float], params: dict[str, Any]) -> list[float]:
    """Probabilities by the definitions: temperature, then min_p, top_k and top_p, each on what the one before left."""
    scores = [x / params.get("temperature", 1.0) for x in logits]
    best = max(scores)
    weights = [math.exp(x - best) for x in scores]
    weights = [w if w >= params.get("min_p", 0.0) else 0.0 for w in weights]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[: params.get("top_k") or None]
    total, reached, kept = sum(weights[t] for t in order), 0.0, set()
    for token in order:
        if reached >= params.get("top_p", 1.0) * total:
            break
        kept.add(token)
        reached += weights[token]
    weights = [w if token in kept else 0.0 for token, w in enumerate(weights)]
    return [w / sum(weights) for w in weights]


def counts(logits: Tensor, seed: int = 17, **params: Any) -> list[float]:
    """How often each token comes in DRAWS draws of many sequences with rising counters."""
    slots = SlotTable(ROWS, 1, 1, len(logits), torch.device("cpu"))
    admit(slots, [admitted(row, seed=seed + row % 7, num_sampled=row, **params) for row in range(ROWS)])
    many, seen = logits.repeat(ROWS, 1), torch.zeros(len(logits))
    for _ in range(0, DRAWS, ROWS):
        sampled = sample_with_transforms(many, np.arange(ROWS), slots)
        assert not errors_of(sampled.faults.numpy(), sampled.broken)
        seen += torch.bincount(sampled.tokens, minlength=len(logits))
        slots.num_sampled += ROWS
    return [float(x) for x in seen]


def surprise(seen: list[float], probabilities: list[float]) -> float:
    """Above 1: not by chance."""
    value, freedom = statistic(seen, probabilities)
    return value / critical(freedom, LEVEL)


@pytest.mark.parametrize("params", CASES, ids=str)
def test_draws_follow_what_was_asked_for(params: dict[str, Any]) -> None:
    """And are told from the same without the last token that is kept, or with the first that is cut."""
    probabilities = expected(LOGITS.tolist(), params)
    seen = counts(LOGITS, **params)
    assert surprise(seen, probabilities) < 1
    plain = expected(LOGITS.tolist(), {"temperature": params.get("temperature", 1.0)})
    kept = {token for token in range(VOCAB) if probabilities[token]}
    cut = set(range(VOCAB)) - kept
    if len(kept) > 1 and cut:
        without = kept - {min(kept, key=lambda token: plain[token])}
        assert surprise(seen, [plain[t] * (t in without) for t in range(VOCAB)]) > 1
    if cut:
        following = max(cut, key=lambda token: plain[token])
        wider = [plain[t] * (t in kept or t == following) for t in range(VOCAB)]
        assert surprise(seen, wider) > 1 or plain[following] * DRAWS < 30  # so few tell nothing


def test_penalties_and_bias_shape_the_distribution() -> None:
    """A sequence's history and its biases change the odds by the formulas."""
    prompt, output = [1, 2, 3, 3], [3, 4, 4, 4, 5]
    params = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.4, "temperature": 1.2,
              "logit_bias": {8: 2.0, 3: 1.0}}  # fmt: skip
    base = admitted(0, seed=3, num_sampled=0, history=prompt + output, prompt_len=len(prompt), **params)
    scores = ruled(LOGITS.tolist(), prompt, output, base.sampling)
    seen = torch.zeros(VOCAB)
    for first in range(0, DRAWS // 4, ROWS):
        slots = SlotTable(ROWS, 1, 1, VOCAB, torch.device("cpu"))
        admit(slots, [replace(base, slot=row, num_sampled=first + row) for row in range(ROWS)])
        seen += torch.bincount(
            sample_with_transforms(LOGITS.repeat(ROWS, 1), np.arange(ROWS), slots).tokens, minlength=VOCAB
        )
    assert surprise(seen.tolist(), expected(scores, {"temperature": 1.2})) < 1
    assert surprise(seen.tolist(), expected(LOGITS.tolist(), {"temperature": 1.2})) > 1


def test_the_critical_values_are_those_of_the_tables() -> None:
    for freedom, table in ((1, 10.83), (5, 20.52), (10, 29.59), (39, 72.05), (100, 149.45)):
        assert critical(freedom, 1e-3) == pytest.approx(table, rel=0.04)
