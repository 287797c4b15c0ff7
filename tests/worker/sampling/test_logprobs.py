"""Reported log probabilities: of the raw logits, whatever sampling did to them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference.logprobs import TokenScores, token_logprobs
from quire.foundation.messages.workers import TokenLogprobs
from quire.runtime.worker.sampling import logprobs
from quire.runtime.worker.sampling.logprobs import UNSORTED_MOST, LogprobsMode, LogprobsRequest
from quire.runtime.worker.sampling.logprobs import score as plain_score
from quire.runtime.worker.slot_table import HostSlotMirror
from tests.checkpoints import make_llama
from tests.worker.driver import Driver, admitted, config_for


def report(
    logits: Tensor,
    tokens: list[int],
    wanted: list[int],
    named: dict[int, list[int]] | None = None,
    mode: LogprobsMode = "raw_logprobs",
) -> list[TokenLogprobs | None]:
    made = LogprobsRequest(np.array(wanted), named or {}, mode)
    assert made
    return made.launch(logits, torch.tensor(tokens))()


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
    slots = HostSlotMirror(3)
    slots.admit(admitted(0, seed=0, num_sampled=0))
    slots.admit(admitted(1, seed=0, num_sampled=0, logprobs=0))
    assert slots.logprobs_request(np.array([0, 2]), "raw_logprobs") is None
    assert slots.logprobs_request(np.array([0, 1]), "raw_logprobs") is not None


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


@pytest.mark.parametrize("wanted", [[100, -1, 3, 70, 0], [64, 3, 3, 3, 3]])
def test_where_many_are_wanted_rows_are_looked_at_some_at_a_time(
    wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, tokens, named = torch.randn(5, 130), [4, 5, 6, 7, 129], {2: [3, 129], 4: []}
    expected = report(logits, tokens, wanted, named)
    asked: list[tuple[int, int]] = []

    def remembering(op: str, device: str) -> object:
        def scoring(logits: Tensor, rows: Tensor, tokens: Tensor, k: int, *, normalise: bool) -> TokenScores:
            asked.append((len(rows), k))
            return token_logprobs(logits, rows, tokens, k, normalise=normalise)

        return scoring

    monkeypatch.setattr(logprobs, "SORTED_LOGITS", 2 * 130)
    monkeypatch.setattr(logprobs, "kernel", remembering)
    assert report(logits, tokens, wanted, named) == expected
    assert asked == ([(2, 100), (2, 100)] if max(wanted) > UNSORTED_MOST else [(5, 64)])


def test_what_is_named_asks_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    monkeypatch.setattr(
        logprobs, "score", lambda *args, **options: most.append(args[3]) or plain_score(*args, **options)
    )
    report(torch.randn(2, 9), [1, 2], [7, 3], {0: [1, 2, 3, 4, 5, 6, 7]})
    assert most == [3]


def test_the_largest_step_reports_as_many_as_may_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_llama(tmp_path, tokenizer=False)
    most: dict[int, set[int]] = {}
    for asked in (20, -1):
        runner = Driver(config_for(directory, max_logprobs=asked)).worker._runner
        taken = most.setdefault(asked, set())

        def remember(*args: Any, taken: set[int] = taken, **options: Any) -> TokenScores:
            taken.add(args[3])
            return plain_score(*args, **options)

        monkeypatch.setattr(logprobs, "score", remember)
        runner.run_largest()
    assert most == {20: {1}, -1: {1, runner.slots.vocab_size}}


def test_what_is_found_without_sorting_is_what_the_kernel_finds() -> None:
    from quire.compute.kernels.triton.sampling import logprobs as on_card

    assert UNSORTED_MOST == on_card.MOST
