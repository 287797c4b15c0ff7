"""Verification: whatever is proposed, tokens follow the distribution of plain sampling, and are those of it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.compute.kernels.dispatch import KERNELS
from quire.compute.kernels.reference import drafts as reference
from quire.foundation.messages.workers import Result
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.sampling.logprobs import LogprobsMode
from quire.runtime.worker.sampling.sampled_outputs import UNSOUND_TEXT, SampledOutputs
from quire.runtime.worker.sampling.sampler import sample_with_transforms
from quire.runtime.worker.sampling.token_bitmasks import BitmaskBuffer
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.synthetic_acceptance import SyntheticAcceptance
from quire.runtime.worker.speculation.verification import Verifier
from quire.sampling_params import SamplingParams
from tests.worker.driver import admit, admitted
from tests.worker.sampling.test_sampler import assert_follows, keep
from tests.worker.steps import verifying

VOCAB = 8
SAMPLES, ROWS = 100_000, 4_000
NEXT = torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(1)) * 1.5
"""A model: logits after each token."""
START = 0
MOST_DRAFTS = 6


def table(owners: list[dict[str, Any]], length: int = 10) -> SlotTable:
    slots = SlotTable(len(owners), 1, 1, VOCAB, torch.device("cpu"), drafts=MOST_DRAFTS)
    admit(slots, [admitted(i, **{"seed": 3, "num_sampled": 0} | owner) for i, owner in enumerate(owners)])
    slots.length[:-1] = length
    return slots


def verifier(
    slots: SlotTable, mode: LogprobsMode = "raw_logprobs", synthetic: SyntheticAcceptance | None = None
) -> Verifier:
    positions = slots.dummy * (1 + MOST_DRAFTS)
    masks, outputs = BitmaskBuffer(64, VOCAB, slots.device), SampledOutputs(2 * positions, BufferRing(slots.device))
    return Verifier(slots, positions, mode, masks, outputs, synthetic)


def verify(
    slots: SlotTable,
    proposed: list[list[int]],
    last: list[int],
    mode: LogprobsMode = "raw_logprobs",
    broken: tuple[int, ...] = (),
) -> Result:
    """A step of all slots, whose last tokens are `last`; logits of `broken` positions are no numbers."""
    before = [token for row, first in zip(proposed, last, strict=True) for token in (first, *row)]
    logits = NEXT[torch.tensor(before)]
    logits[list(broken)] = float("nan")
    step, own = verifying(slots, proposed), verifier(slots, mode)
    own.begin(step)
    return own.verify(step, logits).result()


def rows_of(result: Result) -> list[list[int]]:
    ends = np.cumsum(result.counts).tolist()
    return [result.tokens[end - count : end] for end, count in zip(ends, result.counts, strict=True)]


def pairs(propose: Any, **sampling: Any) -> tuple[Tensor, Tensor]:
    """How often each token came first, and by first token how often each came second, over SAMPLES rows."""
    first, second = torch.zeros(VOCAB), torch.zeros(VOCAB, VOCAB)
    slots = table([sampling] * ROWS)
    for batch in range(SAMPLES // ROWS):
        slots.num_sampled[:-1] = torch.arange(ROWS) * 1_000_000 + batch * 10  # far apart: no random number comes twice
        result = verify(slots, [propose() for _ in range(ROWS)], [START] * ROWS)
        counts, tokens = torch.tensor(result.counts), torch.tensor(result.tokens)
        begins = counts.cumsum(0) - counts
        several = begins[counts > 1]
        first += torch.bincount(tokens[begins], minlength=VOCAB)
        second += torch.bincount(tokens[several] * VOCAB + tokens[several + 1], minlength=VOCAB**2).view(VOCAB, VOCAB)
    return first, second


def guess(seed: int) -> Any:
    """Drafts like those of a model that is wrong in its own way."""
    rng = random.Random(seed)
    some = [[rng.choice([1, 1, 3, 5, 6]) for _ in range(rng.randint(1, 3))] for _ in range(997)]
    order = itertools.cycle(some)
    return lambda: next(order)


def filtered(logits: Tensor, **sampling: Any) -> Tensor:
    """Probabilities as documented, by sorting."""
    p = (logits / sampling.get("temperature", 1.0)).softmax(-1)
    p = torch.where(p >= sampling.get("min_p", 0.0) * p.max(), p, 0.0)
    order = p.argsort(descending=True).tolist()
    kept = order[: sampling.get("top_k", VOCAB)]
    whole, mass, nucleus = float(p[kept].sum()), 0.0, []
    for token in kept:
        if mass < sampling.get("top_p", 1.0) * whole:
            nucleus.append(token)
        mass += float(p[token])
    return keep(p, *nucleus)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("sampling", SETTINGS)
def test_tokens_follow_the_distribution_whatever_is_proposed(sampling: dict[str, Any]) -> None:
    first, second = pairs(guess(1), **sampling)
    assert_follows(first, filtered(NEXT[START], **sampling))
    for token in (1, 3, 5, 6):
        if second[token].sum() > 1_000:
            assert_follows(second[token], filtered(NEXT[token], **sampling))
    assert (second.sum(-1) > 1_000).sum() >= 1, "no draft was accepted"


def test_a_bias_of_the_request_counts_at_every_position() -> None:
    bias = torch.zeros(VOCAB)
    bias[2] = 1.5
    first, second = pairs_of_few(logit_bias={2: 1.5})
    assert_follows(first, (NEXT[START] + bias).softmax(-1))
    assert_follows(second[1], (NEXT[1] + bias).softmax(-1))


def pairs_of_few(**sampling: Any) -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.SAMPLES", 20_000)
        return pairs(guess(2), **sampling)


def plant_wrong_gains(by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: each row gains so many tokens more than it should, as far as it has positions."""

    def wrong(*given: Any) -> None:
        tokens, _, _, ends, slots, length, last, drawn, _, counts = given
        reference.verify_drafts(*given)
        first = torch.cat((ends.new_zeros(1), ends[:-1]))
        gained = (counts + by).clamp(torch.ones_like(counts), ends - first)
        last[slots[first]] = tokens[first + gained - 1]
        for column in (length, drawn):
            column[slots[first]] += gained - counts
        counts.copy_(gained)

    monkeypatch.setattr(reference, "_wrong", wrong, raising=False)
    monkeypatch.setitem(KERNELS, ("verify_drafts", "cpu"), f"{reference.__name__}:_wrong")


@pytest.mark.parametrize("bug", [1, -1])
def test_one_draft_too_many_or_few_is_noticed(bug: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected draft's place is taken as accepted; and its mirror image, which loses tokens."""
    plant_wrong_gains(bug, monkeypatch)
    with pytest.raises(AssertionError):
        test_a_step_gains_what_steps_without_drafts_gain({})
    if bug > 0:
        with pytest.raises(AssertionError):
            test_tokens_follow_the_distribution_whatever_is_proposed({"seed": 5})


def alone(owner: dict[str, Any], tokens: int, last: int = START) -> list[int]:
    """What a slot samples token by token."""
    slots, found = table([owner]), []
    for _ in range(tokens):
        sampled = sample_with_transforms(NEXT[last].unsqueeze(0), np.array([0]), slots)
        last = int(sampled.tokens)
        slots.num_sampled[0] += 1
        found.append(last)
    return found


ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "history": [1, 2], "prompt_len": 2},
    {"bad_words": [[1, 2], [3], [2, 1, 4]], "history": [7], "prompt_len": 1},
    {"logit_bias": {4: 2.0}, "temperature": 0.7},
    {"min_tokens": 4, "stop_ids": [1, 3]},
    {"allowed_token_ids": [1, 2, 3]},
]


@pytest.mark.parametrize("owner", ASKED)
def test_a_step_gains_what_steps_without_drafts_gain(owner: dict[str, Any]) -> None:
    """Drafts are right as far as a random place; seeds bring the same tokens, and slots are left as they would be."""
    rng = random.Random(5)
    for number in range(40):
        asked = {"seed": number, **owner}
        free = alone(asked, 12)
        slots, got = table([asked, {"seed": 99}]), list[int]()
        while len(got) < 8:
            right = rng.randint(0, 4)
            drafts = free[len(got) : len(got) + right]
            if rng.random() < 0.7:
                drafts.append((free[len(got) + right] + 1) % VOCAB)
            result = verify(slots, [drafts, []], [(got or [START])[-1], START])
            mine = rows_of(result)[0]
            assert len(mine) == right + 1
            assert result.drafted == [len(drafts), 0]
            got += mine
            assert slots.last_token[0] == got[-1]
            assert slots.num_sampled[0] == len(got)
            assert slots.length[0] == 10 + len(got)
        assert got == free[: len(got)]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_each_token_that_is_gained_is_reported(mode: LogprobsMode) -> None:
    owners = [{"temperature": 0.5, "logprobs": 2}, {"seed": 8}, {"seed": 9, "logprobs": 0, "logit_bias": {2: 1.0}}]
    slots = table(owners)
    result = verify(slots, [[1, 2, 3], [4], [5]], [START] * 3, mode)
    first, second, third = result.counts
    assert len(result.logprobs) == sum(result.counts)
    assert result.logprobs[first : first + second] == [None] * second
    before = [START, 1, 2, 3]
    for place in range(first):
        scores = NEXT[before[place]] / (0.5 if mode == "processed_logprobs" else 1)
        entry = result.logprobs[place]
        assert entry is not None
        assert entry.logprob == pytest.approx(float(scores.log_softmax(-1)[result.tokens[place]]), abs=1e-5)
        assert entry.top_ids == scores.topk(2).indices.tolist()
    assert all(entry is not None for entry in result.logprobs[-third:])


def test_a_position_that_is_reached_and_no_number_fails_its_row_alone() -> None:
    greedy = {"temperature": 0.0}
    right = alone(greedy, 3)
    slots = table([greedy, greedy, greedy])
    wrong = [(right[0] + 1) % VOCAB, 1]
    result = verify(slots, [right[:2], wrong, right[:2]], [START] * 3, broken=(1, 4))
    assert result.counts == [1, 1, 3], "the draft before the position is accepted"
    assert result.errors == [(0, UNSOUND_TEXT)]
    assert rows_of(result) == [right[:1], right[:1], right]


def test_sampling_params_of_every_kind_are_in_the_list() -> None:
    """Who adds a field that changes sampling adds a row here, or says why not."""
    covered = {name for owner in [*ASKED, *SETTINGS] for name in owner}
    fields = {"temperature", "top_k", "top_p", "min_p", "logit_bias", "presence_penalty", "frequency_penalty",
              "repetition_penalty", "min_tokens", "allowed_token_ids"}  # fmt: skip
    assert fields <= covered
    assert fields <= set(SamplingParams.__struct_fields__)
