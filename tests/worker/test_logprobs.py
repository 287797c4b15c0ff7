"""Reported log probabilities: of the raw logits, whatever sampling did to them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quire.messages import TokenLogprobs
from quire.worker.logprobs import LogprobsMode, Reports


def report(
    logits: Tensor,
    tokens: list[int],
    wanted: list[int],
    named: dict[int, list[int]] | None = None,
    mode: LogprobsMode = "raw_logprobs",
) -> list[TokenLogprobs | None]:
    made = Reports(np.array(wanted), named or {}, mode)
    assert made
    return made.collect(made.launch(logits, torch.tensor(tokens)).to_host())


def test_values_ranks_and_order() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 9.0], [5.0, 1.0, 1.0, 1.0]])
    entries = report(logits, [2, 3, 3], [2, -1, 0])
    first, none, last = entries
    assert first is not None
    assert last is not None
    assert none is None
    expected = logits.log_softmax(-1)
    assert (first.rank, first.top_ids) == (2, [1, 2])
    assert math.isclose(first.logprob, expected[0, 2].item(), rel_tol=1e-6)
    assert np.allclose(first.top_logprobs, expected[0, [1, 2]])
    assert (last.rank, last.top_ids, last.top_logprobs) == (2, [], [])  # equal tokens share a rank
    assert math.isclose(last.logprob, expected[2, 3].item(), rel_tol=1e-6)


def test_nobody_asks() -> None:
    assert not Reports(np.array([-1, -1]), {}, "raw_logprobs")


def test_no_more_than_the_vocabulary() -> None:
    entry = report(torch.zeros(1, 3), [1], [20])[0]
    assert entry is not None
    assert len(entry.top_ids) == 3


def test_named_tokens_stand_in_their_own_order() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).repeat(3, 1)
    entries = report(logits, [2, 2, 0], [0, 1, 0], {2: [0], 0: [3, 1]})
    expected = logits.log_softmax(-1)[0]
    assert entries[0] is not None
    assert entries[1] is not None
    assert (entries[0].rank, entries[0].top_ids) == (2, [3, 1])
    assert np.allclose(entries[0].top_logprobs, expected[[3, 1]])
    assert entries[1].top_ids == [1]
    assert entries[2] is not None
    assert entries[2].top_ids == [0]
    assert np.allclose(entries[2].top_logprobs, expected[[0]])


def test_logits_are_reported_as_they_are() -> None:
    entry = report(torch.tensor([[1.0, 3.0, 2.0]]), [0], [2], mode="raw_logits")[0]
    assert entry == TokenLogprobs(1.0, 3, [1, 2], [3.0, 2.0])
