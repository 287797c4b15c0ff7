"""Drafts that are accepted by random numbers: as often as asked at each position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.foundation.config import Config
from quire.runtime.worker.speculation.step_drafts import NO_DRAFT
from quire.runtime.worker.speculation.synthetic_acceptance import SyntheticAcceptance
from tests.worker.speculation.test_verification import NEXT, START, VOCAB, table, verifier
from tests.worker.steps import verifying

ROWS = 20_000
CPU = torch.device("cpu")


def shares(gained: list[int], drafts: int) -> list[float]:
    """By position, of how many rows the draft there and all before it stayed."""
    return [float((np.array(gained) > place + 1).mean()) for place in range(drafts)]


@pytest.mark.parametrize("owner", [{}, {"logit_bias": {2: 1.0}}])
def test_each_position_is_accepted_as_often_as_asked(owner: dict[str, Any]) -> None:
    """Within five deviations; of drafts that the model would hardly ever sample, and of others."""
    rates = [0.9, 0.54, 0.54, 0.0]
    slots = table([owner] * ROWS)
    slots.host.max_lengths[:-1] = 10
    step = verifying(slots, [[row % VOCAB, 1, 2, 3] for row in range(ROWS)])
    own = verifier(slots, synthetic=SyntheticAcceptance(rates, VOCAB, CPU))
    own.begin(step)
    result = own.verify(step, NEXT[START].repeat(len(step.slots), 1)).result()
    for share, rate in zip(shares(result.counts, 4), rates, strict=True):
        assert abs(share - rate) <= 5 * (rate * (1 - rate) / ROWS) ** 0.5
    assert slots.length[:-1].tolist() == [10 + count for count in result.counts]
    assert slots.num_sampled[:-1].tolist() == result.counts


def test_what_is_not_accepted_is_another_token_than_the_draft() -> None:
    tokens, drafts = torch.tensor([3, 7, 5, 2]), torch.tensor([3, 7, 1, NO_DRAFT])
    SyntheticAcceptance([0.0], 8, CPU).falsify(tokens, drafts, torch.tensor([0, 0, 0, 1]))
    assert tokens.tolist() == [4, 0, 5, 2]
    SyntheticAcceptance([1.0], 8, CPU).falsify(tokens, drafts, torch.tensor([0, 0, 0, 1]))
    assert tokens.tolist() == [3, 7, 1, 2]


@pytest.mark.parametrize(
    ("asked", "rates"),
    [
        ({"synthetic_acceptance_rates": [1, 0.5, 0.5]}, (1.0, 0.5, 0.5)),
        ({"synthetic_acceptance_length": 3.0}, (1.0, 1.0, 0.0)),
        ({"synthetic_acceptance_length": 2.25}, (1.0, 0.25, 0.0)),
        ({"synthetic_acceptance_length": 1}, (0.0, 0.0, 0.0)),
    ],
)
def test_rates_are_those_of_the_settings(asked: dict[str, Any], rates: tuple[float, ...]) -> None:
    method = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    speculation = Config().with_values(speculative_config=method | asked).speculation.speculation
    assert speculation is not None
    assert speculation.synthetic_rates == rates
