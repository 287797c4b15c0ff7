"""Sampling by the definitions: every filter alone and together, ties, faults, thresholds, odd vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.cpu.sample import sample
from quire.compute.kernels.reference.sample import (
    ALL_TIES,
    FINE,
    NOTHING_LEFT,
    UNSOUND,
    SamplingThresholds,
    apply_thresholds,
)
from tests.kernels.exact_sampling import columns, truths

WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.02},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    {"top_k": 64, "min_p": 0.02},
    {"temperature": 0.5, "top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_p": 0.8},
    {"temperature": 9.0, "top_p": 0.97, "min_p": 0.01},
    {"temperature": 2.0, "top_k": 1600, "top_p": 0.9},
    {"temperature": 50.0, "top_p": 0.95},
]
DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.usefixtures("instructions")


def drawn(logits: Tensor, wishes: list[dict[str, Any]], **others: Any) -> tuple[Tensor, Tensor]:
    """Tokens and faults, a row for each wish."""
    number = len(wishes)
    tokens, faults = torch.full((number,), -1), torch.full((number,), -1, dtype=torch.int8)
    sample(logits, torch.arange(number), columns("cpu", wishes), tokens, faults, **others)
    return tokens, faults


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [3, 100, 4099])
def test_tokens_by_the_definitions(dtype: torch.dtype, vocab: int) -> None:
    """bf16 logits have many ties."""
    wishes = [wish | {"seed": 77 + 2**40 * seed, "drawn": seed} for wish in WISHES for seed in range(8)]
    logits = (3 * torch.randn(len(wishes), vocab, generator=torch.Generator().manual_seed(0))).to(dtype)
    tokens, faults = drawn(logits, wishes)
    assert not faults.any()
    for token, truth in zip(
        tokens.tolist(), truths(logits, torch.arange(len(wishes)), columns("cpu", wishes)), strict=True
    ):
        assert truth.miss(token) <= truth.slack


@pytest.mark.parametrize("dtype", DTYPES)
def test_thresholds_say_what_stays(dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(len(WISHES), 2000, generator=torch.Generator().manual_seed(1))).to(dtype)
    thresholds = SamplingThresholds(torch.empty(len(WISHES)), torch.empty(len(WISHES), dtype=torch.int64))
    drawn(logits, WISHES, thresholds=thresholds)
    asked = columns("cpu", WISHES)
    assert thresholds.value[0] == float("-inf")
    assert thresholds.last_id[0] == ALL_TIES
    stays = apply_thresholds(logits, asked.temperature, thresholds) > float("-inf")
    for row, truth in enumerate(truths(logits, torch.arange(len(WISHES)), asked)):
        if WISHES[row].get("temperature") != 0:
            assert ((stays[row] == truth.kept) | truth.unsure).all()


def test_the_first_of_the_likeliest() -> None:
    """Wherever they stand, within a vector or behind the last whole one."""
    for vocab in (1, 17, 600, 1025):
        for first in {0, vocab // 2, vocab - 1}:
            logits = torch.full((1, vocab), -2.0)
            logits[0, first::3] = 1.5
            assert drawn(logits, [{"temperature": 0.0}])[0].item() == first


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 40, 516])
def test_faults(dtype: torch.dtype, place: int) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.zeros(5, 517, dtype=dtype)
    logits[0, place], logits[1, place], logits[2] = nan, inf, -inf
    logits[3], logits[3, place] = -inf, -4.0
    for wish in ({"temperature": 0.0}, {"top_p": 0.5}):
        tokens, faults = drawn(logits, [wish] * 5)
        assert faults.tolist() == [UNSOUND, UNSOUND, NOTHING_LEFT, FINE, FINE]
        assert tokens[3] == place
        assert ((tokens >= 0) & (tokens < 517)).all()


def test_slots_go_on() -> None:
    """A slot keeps its token, and counts it; rows are any slots."""
    asked = columns("cpu", [{"temperature": 0.0, "drawn": number} for number in range(6)])
    last, slots = torch.full((6,), -1), torch.tensor([4, 1])
    logits = torch.eye(2, 9)[:, :9]
    tokens, faults = torch.empty(2, dtype=torch.int64), torch.empty(2, dtype=torch.int8)
    sample(logits, slots, asked, tokens, faults, last)
    assert last.tolist() == [-1, 1, -1, -1, 0, -1]
    assert asked.drawn.tolist() == [0, 2, 2, 3, 5, 5]
