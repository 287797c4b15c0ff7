"""Sampling: the distributions that come out, their edges, and that a row's tokens depend on the row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from quire.compute.kernels.reference.sample import apply_min_p, apply_top_k_top_p, sample_from_scores
from quire.runtime.worker.sampling.sampled_outputs import UNSOUND_TEXT, errors_of
from quire.runtime.worker.sampling.sampler import sample_and_advance, sample_with_transforms, warm_up
from quire.runtime.worker.slot_table import SlotTable
from tests.worker.driver import admit, admitted

SAMPLES = 40_000
LOGITS = torch.tensor([1.0, 3.0, 0.5, 2.5, -1.0, 2.0, -float("inf"), 0.0])


def table(owners: list[dict[str, Any]], vocab_size: int) -> SlotTable:
    slots = SlotTable(len(owners), 1, 1, vocab_size, torch.device("cpu"))
    admit(slots, [admitted(i, **{"seed": 0, "num_sampled": 0} | owner) for i, owner in enumerate(owners)])
    return slots


def sample_tokens(logits: Tensor, owners: list[dict[str, Any]]) -> list[int]:
    """One token for each owner; logits [owners, vocab]."""
    slots = table(owners, logits.shape[-1])
    sampled = sample_with_transforms(logits.clone(), np.arange(len(owners)), slots)
    assert not errors_of(sampled.faults.numpy(), sampled.broken, sampled.transformed)
    return sampled.tokens.tolist()


def frequencies(logits: Tensor, **owner: Any) -> Tensor:
    """Counts of each token over SAMPLES samples with one seed and rising counters."""
    rows = 2_000
    one = admitted(0, **{"seed": 11, "num_sampled": 0} | owner)
    counts = torch.zeros(len(logits))
    for first in range(0, SAMPLES, rows):
        slots = SlotTable(rows, 1, 1, len(logits), torch.device("cpu"))
        admit(slots, [replace(one, slot=row, num_sampled=first + row) for row in range(rows)])
        tokens = sample_with_transforms(logits.repeat(rows, 1), np.arange(rows), slots).tokens
        counts += torch.bincount(tokens, minlength=len(logits))
    return counts


def assert_follows(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square against what was expected, at p = 0.001; impossible tokens must not come at all."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] / probabilities.sum() * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    critical = [0.0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12]
    assert statistic < critical[int(possible.sum()) - 1] + 1e-9, (statistic, counts)


def keep(probabilities: Tensor, *tokens: int) -> Tensor:
    kept = torch.zeros_like(probabilities)
    kept[list(tokens)] = probabilities[list(tokens)]
    return kept


def test_plain_sampling_follows_softmax() -> None:
    assert_follows(frequencies(LOGITS), LOGITS.softmax(-1))


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    assert_follows(frequencies(LOGITS, temperature=temperature), (LOGITS / temperature).softmax(-1))


def test_top_k_keeps_the_likeliest() -> None:
    assert_follows(frequencies(LOGITS, top_k=3), keep(LOGITS.softmax(-1), 1, 3, 5))


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    probabilities = LOGITS.softmax(-1)  # 1: .464, 3: .281, 5: .171
    assert_follows(frequencies(LOGITS, top_p=0.7), keep(probabilities, 1, 3))
    assert_follows(frequencies(LOGITS, top_p=0.76), keep(probabilities, 1, 3, 5))


def test_min_p_keeps_what_is_likely_beside_the_likeliest() -> None:
    assert_follows(frequencies(LOGITS, min_p=0.3), keep(LOGITS.softmax(-1), 1, 3, 5))


def test_order_is_temperature_min_p_top_k_top_p() -> None:
    """Each filter sees what the one before left: top_p counts within the top k, min_p after the temperature."""
    # Within the best three, 1 has .506 and 3 has .307: together beyond .8. Of all, they would need a third.
    probabilities = LOGITS.softmax(-1)
    assert_follows(frequencies(LOGITS, top_k=3, top_p=0.8), keep(probabilities, 1, 3))
    # At temperature 4, token 0 is exp(-.5) as likely as the best; at 1 it would be exp(-2) and cut.
    hot = (LOGITS / 4).softmax(-1)
    assert_follows(frequencies(LOGITS, temperature=4.0, min_p=0.6), keep(hot, 0, 1, 3, 5))
    # min_p leaves 1 and 3 (.623 of both): a top_p under that leaves 1 alone, although it has but .464 of all.
    assert_follows(frequencies(LOGITS, min_p=0.5, top_p=0.6), keep(probabilities, 1))


def test_greedy_takes_the_likeliest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert sample_tokens(logits, [{"temperature": 0.0}]) == [1]
    assert sample_tokens(logits, [{"top_k": 1, "seed": 5}]) == [1]


def test_a_tiny_temperature_is_raised_not_divided_by() -> None:
    assert sample_tokens(torch.tensor([[5e4, 4e4, -5e4]]), [{"temperature": 2e-5}]) == [0]


HUGE = 1e39
"""A number that fp32 does not have."""


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 1.0}, {"top_p": 1e-50}])
def test_a_huge_temperature_makes_all_alike_and_not_a_fault(filters: dict[str, Any]) -> None:
    sampled = {sample_tokens(LOGITS[None], [{"temperature": HUGE, "seed": seed} | filters])[0] for seed in range(200)}
    assert sampled <= set(range(8)) - {6}  # which the logits forbid
    if not filters:
        assert len(sampled) == 7
    assert sample_tokens(LOGITS[None], [{"temperature": HUGE, "allowed_token_ids": [5]} | filters]) == [5]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize("penalty", [HUGE, 1e-50])
def test_huge_penalties_and_biases_do_as_they_say(penalty: float, temperature: float) -> None:
    seen = {"repetition_penalty": penalty, "history": [1, 4, 7], "prompt_len": 1, "temperature": temperature}
    # Raised without end is the likelier of the positive ones; lowered, none of the negative ones is sampled.
    assert sample_tokens(LOGITS[None], [seen | {"top_k": 1}]) == [1 if penalty < 1 else 3]
    bias = {"logit_bias": {2: HUGE, 3: -HUGE}, "temperature": temperature}
    assert sample_tokens(LOGITS[None], [bias]) == [2]
    everything = seen | {"logit_bias": {1: HUGE, 4: -HUGE}, "presence_penalty": -2.0}
    assert sample_tokens(LOGITS[None], [everything | {"top_k": 1}]) == [
        1 if penalty < 1 else 3
    ]  # 1 is divided as it was raised


def test_equal_scores_are_cut_to_exactly_k() -> None:
    assert_follows(frequencies(torch.zeros(6), top_k=4), keep(torch.ones(6), 0, 1, 2, 3))
    assert_follows(frequencies(torch.zeros(8), top_p=0.5), keep(torch.ones(8), 0, 1, 2, 3))


def test_equal_scores_at_the_edge_are_cut_behind_better_ones() -> None:
    scores = torch.tensor([1.0, 5.0, 1.0, 1.0, 0.0, 7.0]) / 4
    assert_follows(frequencies(scores, top_k=3), keep(scores.softmax(-1), 0, 1, 5))


def test_edges_of_the_filters() -> None:
    scores = LOGITS.repeat(5, 1)
    cut = apply_top_k_top_p(scores, torch.tensor([0, 8, 100, 0, 2]), torch.tensor([1.0, 1.0, 1.0, 1e-9, 1.0]))
    assert [(row > -float("inf")).sum().item() for row in cut] == [7, 7, 7, 1, 2]
    assert torch.equal(apply_min_p(scores, torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]))[2:], scores[2:])
    assert apply_min_p(scores, torch.full((5,), 1.0))[0].isfinite().nonzero().tolist() == [[1]]


def test_wide_vocabulary_is_cut_like_a_narrow_one() -> None:
    """Beyond the first look of a thousand candidates, and with rows on either side of it."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 5_000, generator=generator)
    top_k, top_p = torch.tensor([0, 0, 2_000, 7]), torch.tensor([0.97, 0.2, 0.99, 0.5])
    cut = apply_top_k_top_p(scores, top_k, top_p)
    for row in range(4):
        order = scores[row].sort(descending=True, stable=True).indices[: top_k[row] or None]
        probabilities = scores[row][order].double().softmax(-1)
        count = int((probabilities.cumsum(-1) - probabilities < top_p[row].double()).sum())
        assert abs(int(cut[row].isfinite().sum()) - count) <= 1  # the sum's last place may differ
        assert cut[row].isfinite()[order[: count - 1]].all()


def test_rows_of_the_wide_look_do_not_depend_on_each_other() -> None:
    scores = torch.randn(6, 4_000, generator=torch.Generator().manual_seed(1))
    top_k, top_p = torch.tensor([0, 5, 0, 3_000, 0, 1_500]), torch.tensor([0.9, 0.9, 0.999, 0.9, 0.1, 1.0])
    together = apply_top_k_top_p(scores, top_k, top_p)
    for row in range(6):
        alone = apply_top_k_top_p(scores[row : row + 1], top_k[row : row + 1], top_p[row : row + 1])
        assert torch.equal(together[row : row + 1], alone)


OWNERS = [
    {"seed": 3, "num_sampled": 4},
    {"seed": 3, "num_sampled": 4, "top_p": 0.8},
    {"temperature": 0.0},
    {"seed": 2**64 - 1, "top_k": 5, "min_p": 0.05, "temperature": 1.7},
    {"seed": 9, "top_k": 2, "top_p": 0.4},
    {"seed": 8, "min_p": 0.2},
]


@settings(max_examples=30)
@given(order=st.permutations(range(len(OWNERS))), size=st.integers(1, len(OWNERS)))
def test_a_row_samples_the_same_whatever_is_beside_it(order: list[int], size: int) -> None:
    logits = torch.randn(len(OWNERS), 300, generator=torch.Generator().manual_seed(2))
    alone = [sample_tokens(logits[i : i + 1], [OWNERS[i]])[0] for i in range(len(OWNERS))]
    chosen = order[:size]
    assert sample_tokens(logits[chosen], [OWNERS[i] for i in chosen]) == [alone[i] for i in chosen]


@settings(max_examples=200)
@given(
    probabilities=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.1, 0.5]), min_size=1, max_size=20),
    number=st.sampled_from([0.0, 2.0**-53, 0.25, 0.5, 1 - 2.0**-53]),
)
def test_impossible_tokens_are_never_chosen(probabilities: list[float], number: float) -> None:
    if not any(probabilities):
        return
    scores = torch.tensor([probabilities]).log()
    token = sample_from_scores(scores, torch.tensor([number], dtype=torch.float64)).item()
    assert probabilities[int(token)] > 0


def test_stop_tokens_wait_for_min_tokens() -> None:
    """Greedy and random rows alike; the ban ends by itself, and other rows keep their stop tokens."""
    logits = torch.tensor([0.0, 9.0, 8.0, 1.0]).repeat(3, 1)
    ban = {"min_tokens": 3, "stop_ids": [1, 2], "num_sampled": 1}
    slots = table([{"temperature": 0.0} | ban, {"temperature": 1.0, "top_k": 1} | ban, {"temperature": 0.0}], 4)
    sampled = [sample_with_transforms(logits.clone(), np.arange(3), slots).tokens.tolist() for _ in range(3)]
    assert sampled == [[3, 3, 1], [3, 3, 1], [1, 1, 1]]
    assert not slots.transforms.active_rows(np.arange(3))  # nobody pays for transforms from here on


def test_a_ban_ends_with_its_owner() -> None:
    logits = torch.tensor([[0.0, 9.0]])
    slots = table([{"temperature": 0.0, "min_tokens": 3, "stop_ids": [1]}], 2)
    assert sample_with_transforms(logits.clone(), np.arange(1), slots).tokens.tolist() == [0]
    admit(slots, [admitted(0, seed=0, num_sampled=0, temperature=0.0)])
    assert sample_with_transforms(logits.clone(), np.arange(1), slots).tokens.tolist() == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unsound_rows_are_told(bad: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    expected = sample_tokens(logits, [{"seed": 1, "top_p": 0.9}] * 4)
    logits[1, 7] = bad
    logits[2] = -float("inf")
    slots = table([{"seed": 1, "top_p": 0.9}] * 4, 50)
    sampled = sample_with_transforms(logits, np.arange(4), slots)
    assert errors_of(sampled.faults.numpy()) == {1: UNSOUND_TEXT, 2: UNSOUND_TEXT}
    assert [sampled.tokens[0].item(), sampled.tokens[3].item()] == [expected[0], expected[3]]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_warm_up_changes_nothing_but_the_dummy(mode: Any) -> None:
    """It runs what sampling, transforms and reports may need, and the next tokens are what they would have been."""
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(4))
    owners = [{"seed": i, "presence_penalty": 1.5, "history": [1, 2, 3], "prompt_len": 2} for i in range(3)]
    warmed, fresh = table(owners, 30), table(owners, 30)
    before = logits.clone()
    warm_up(logits, warmed, mode)
    assert torch.equal(logits, before)
    for _ in range(3):
        sampled = [sample_with_transforms(logits, np.arange(3), slots).tokens.tolist() for slots in (warmed, fresh)]
        assert sampled[0] == sampled[1]
        assert warmed.num_sampled.tolist()[:-1] == fresh.num_sampled.tolist()[:-1]


def test_slots_that_advance_sample_the_same() -> None:
    slots, alone = table(OWNERS, 300), table(OWNERS, 300)
    order = [4, 0, 2, slots.dummy, slots.dummy]  # padding stands behind
    tokens, faults = torch.full((5,), -1), torch.full((5,), 9, dtype=torch.int8)
    generator = torch.Generator().manual_seed(5)
    for step in range(3):
        logits = torch.randn(5, 300, generator=generator)
        expected = sample_with_transforms(logits[:3], np.array(order[:3]), alone).tokens
        sample_and_advance(logits, torch.tensor(order), slots, tokens, faults)
        alone.num_sampled[order[:3]] += 1
        assert tokens[:3].tolist() == slots.last_token[order[:3]].tolist() == expected.tolist()
        assert faults.tolist() == [0] * 5
        assert slots.num_sampled[[0, 1, 2, 4]].tolist() == [4 + step + 1, 4, step + 1, step + 1]
