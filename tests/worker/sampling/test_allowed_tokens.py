"""Slots that may sample some tokens only, however many these are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.foundation.messages.workers import Admitted
from quire.runtime.worker.sampling import token_rules
from quire.runtime.worker.sampling.token_rules import AllowedTokens
from quire.sampling_params import SamplingParams

VOCAB = 1_003  # no multiple of 8


def owner(slot: int, ids: list[int] | None) -> Admitted:
    return Admitted(slot, 0, 1, 0, SamplingParams(allowed_token_ids=ids))


@pytest.mark.parametrize("most", [2**24, 2 * VOCAB])
def test_only_what_is_allowed_is_left(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots at once, or two after two."""
    monkeypatch.setattr(token_rules, "MAX_LOGITS", most)
    choose = np.random.default_rng(0)
    wishes: list[list[int] | None] = [
        [0], None, [VOCAB - 1, 7, 7], list(range(VOCAB)), choose.permutation(VOCAB)[:500].tolist(), [8, 15, 16],
    ]  # fmt: skip
    allowed = AllowedTokens(len(wishes) + 1, VOCAB, torch.device("cpu"))
    assert [allowed.admit(owner(slot, ids)) for slot, ids in enumerate(wishes)] == [ids is not None for ids in wishes]
    logits = torch.randn(len(wishes) + 1, VOCAB)
    found, row_of = logits.clone(), [4, 0, 6, 2, 1, 3]
    allowed.apply(found, [(row, slot) for slot, row in enumerate(row_of)])
    for slot, ids in enumerate(wishes):
        expected = logits[row_of[slot]].clone()
        if ids is not None:
            expected[[token for token in range(VOCAB) if token not in set(ids)]] = float("-inf")
        assert torch.equal(found[row_of[slot]], expected)
    assert torch.equal(found[5], logits[5])


def test_a_new_owner_has_its_own_or_none() -> None:
    allowed = AllowedTokens(2, VOCAB, torch.device("cpu"))
    logits = torch.zeros(1, VOCAB)
    for ids, left in (([1, 2, 3], {1, 2, 3}), ([3, 900], {3, 900}), (None, set(range(VOCAB)))):
        assert allowed.admit(owner(1, ids)) == (ids is not None)
        found = logits.clone()
        allowed.apply(found, [(0, 1)])
        assert {*found[0].isfinite().nonzero().flatten().tolist()} == left


def test_whole_vocabularies_in_all_slots_take_no_more_memory_than_none() -> None:
    allowed = AllowedTokens(9, VOCAB, torch.device("cpu"))
    for slot in range(9):
        allowed.admit(owner(slot, list(range(VOCAB))))
    kept = [value for value in vars(allowed).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in kept) < 9 * VOCAB
