"""Steps of several rows of all kinds gain what their rows would gain alone, token by token."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.compute.kernels.dispatch import KERNELS
from quire.compute.kernels.reference import drafts as reference
from quire.foundation.messages.workers import Result, TokenBitmasks, TokenLogprobs
from quire.runtime.worker.sampling.logprobs import LogprobsMode
from quire.runtime.worker.sampling.sampled_outputs import errors_of
from quire.runtime.worker.sampling.sampler import sample_with_transforms
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.step_handle import MaskedStepHandle
from tests.worker.speculation.test_verification import NEXT, START, VOCAB, alone, table, verifier
from tests.worker.steps import verifying

OWNERS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 3, "logprobs": 2}, {"min_p": 0.1}, {},
    {"temperature": 0.0, "logprobs": 0}, {"temperature": 1.5, "top_k": 5, "top_p": 0.9},
    {"presence_penalty": 1.0, "history": [1, 2], "prompt_len": 2},
    {"logit_bias": {4: 2.0}, "temperature": 0.7, "logprobs": 1}, {"allowed_token_ids": [1, 2, 3]},
]  # fmt: skip


def verified(
    owners: list[dict[str, Any]], proposed: list[list[int]], logits: Tensor, mode: LogprobsMode, masks: TokenBitmasks
) -> tuple[Result, list[Any]]:
    """The result, and what the table holds afterwards."""
    slots = table(owners)
    slots.host.max_lengths[:-1] = 10
    step, own = verifying(slots, proposed, masks.rows), verifier(slots, mode)
    own.begin(step)
    handle = own.verify(step, logits.clone())
    if masks.rows:
        assert isinstance(handle, MaskedStepHandle)
        handle.submit_bitmasks(masks)
    result = handle.result()
    return result, columns_of(slots, result)


def columns_of(slots: SlotTable, result: Result) -> list[Any]:
    """What the table holds of rows that have not failed."""
    failed = {place for place, _ in result.errors}
    fine = [slot for slot in range(slots.dummy) if slot not in failed]
    columns = [slots.length, slots.last_token, slots.num_sampled, torch.from_numpy(slots.host.max_lengths)]
    return [column[fine].tolist() for column in columns]


def token_by_token(
    owners: list[dict[str, Any]], proposed: list[list[int]], logits: Tensor, mode: LogprobsMode, masks: TokenBitmasks
) -> tuple[Result, list[Any]]:
    """The same step, by sampling each position that is reached by itself."""
    slots, at, bits = table(owners), 0, iter(masks.bits)
    masked = dict(zip(masks.rows, masks.counts, strict=True))
    result = Result(1, [], [], [], [], drafted=[len(drafts) for drafts in proposed])
    for row, drafts in enumerate(proposed):
        tokens, entries, error = list[int](), list[TokenLogprobs | None](), ""
        allowed = [next(bits) for _ in range(masked.get(row, 0))]
        for place in range(masked.get(row, 1 + len(drafts))):
            raw = logits[at + place : at + place + 1].clone()
            own = raw.clone()
            if allowed:
                own[0, [token for token in range(VOCAB) if not allowed[place][0] >> token & 1]] = float("-inf")
            found = sample_with_transforms(own, np.array([row]), slots, keep_scores=True)
            assert found.scores is not None
            error = errors_of(found.faults, found.broken, {0} if allowed else found.transformed).get(0, "")
            tokens.append(int(found.tokens))
            request = slots.host.logprobs_request(np.array([row]), mode)
            if request is None:
                entries.append(None)
            else:
                scores = found.scores if request.processed else raw
                entries += request.launch(scores, found.tokens)()
            slots.num_sampled[row] += 1
            if error or place == len(drafts) or drafts[place] != tokens[-1]:
                break
        slots.last_token[row] = tokens[-1]
        slots.length[row] += len(tokens)
        slots.host.max_lengths[row] = 10 + len(tokens)
        at += 1 + len(drafts)
        if error:
            result.errors.append((row, error))
            tokens, entries = tokens[:-1], entries[:-1]
        result.counts.append(len(tokens))
        result.tokens.extend(tokens)
        result.logprobs.extend(entries)
    return result, columns_of(slots, result)


def compare(seed: int, mode: LogprobsMode) -> int:
    """A random step; how many drafts were accepted."""
    rng = random.Random(seed)
    owners, proposed = [], list[list[int]]()
    for row in range(rng.randint(1, 8)):
        owners.append({"seed": seed * 10 + row, **rng.choice(OWNERS)})
        right = alone(owners[-1], 4)[: rng.randint(0, 4)]
        proposed.append(right + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 2))])
    before = [token for row in proposed for token in (START, *row)]
    logits = NEXT[torch.tensor(before)]
    if rng.random() < 0.3:
        logits[rng.randrange(len(logits))] = float("nan")
    rows = [row for row in range(len(owners)) if rng.random() < 0.3] if seed % 2 else []
    counts = [rng.randint(1, 1 + len(proposed[row])) for row in rows]
    bits = [bytes([rng.randrange(1, 256), 0, 0, 0]) for _ in range(sum(counts))]
    masks = TokenBitmasks(1, rows, bits, counts)
    ours, theirs = (each(owners, proposed, logits, mode, masks) for each in (verified, token_by_token))
    assert ours[1] == theirs[1]
    for name in ("counts", "tokens", "errors", "drafted"):
        assert getattr(ours[0], name) == getattr(theirs[0], name)
    assert ours[0].logprobs or not any(theirs[0].logprobs)
    for mine, other in zip(ours[0].logprobs, theirs[0].logprobs, strict=bool(ours[0].logprobs)):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert (mine.rank, mine.top_ids) == (other.rank, other.top_ids)
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
    return sum(ours[0].counts) - len(owners)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_step_gains_what_its_rows_gain_token_by_token(mode: LogprobsMode) -> None:
    assert sum(max(0, compare(seed, mode)) for seed in range(60)) > 40


@pytest.mark.parametrize("bug", ["one too many", "the first counter for all"])
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_too_many(*given: Any) -> None:
        tokens, faults, next_drafts, ends, *columns = given
        place = ends - 1
        others = next_drafts.clone()
        others[place[1:] - 1] = tokens[place[1:] - 1]
        reference.verify_drafts(tokens, faults, others, ends, *columns)

    def first_counter(slots: Tensor, offsets: Tensor, *others: Any) -> None:
        reference.position_columns(slots, torch.zeros_like(offsets), *others)

    bugs: dict[str, tuple[str, Callable[..., None]]] = {
        "one too many": ("verify_drafts", one_too_many),
        "the first counter for all": ("position_columns", first_counter),
    }
    op, wrong = bugs[bug]
    monkeypatch.setattr(reference, "_wrong", wrong, raising=False)
    monkeypatch.setitem(KERNELS, (op, "cpu"), f"{reference.__name__}:_wrong")
    with pytest.raises(AssertionError):
        test_a_step_gains_what_its_rows_gain_token_by_token("raw_logprobs")
