"""A device that decides by itself decides as the host does, whose decisions `test_verification.py` holds against the
distribution: the same results, and the same slot table.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.dispatch import KERNELS
from quire.compute.kernels.reference import drafts as reference
from quire.foundation.messages.workers import Result, TokenBitmasks
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.sampling.logprobs import LogprobsMode
from quire.runtime.worker.sampling.sampled_outputs import SampledOutputs
from quire.runtime.worker.sampling.token_bitmasks import BitmaskBuffer
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.device_verification import DeviceVerifier
from quire.runtime.worker.speculation.verification import Verifier
from quire.runtime.worker.step_handle import MaskedStepHandle
from quire.runtime.worker.step_stager import late_columns
from tests.worker.speculation.test_verification import NEXT, START, VOCAB, alone, table
from tests.worker.steps import verifying

MOST = 64
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 3, "logprobs": 2}, {"min_p": 0.1}, {},
    {"temperature": 0.0, "logprobs": 0}, {"temperature": 1.5, "top_k": 5, "top_p": 0.9},
]  # fmt: skip
TRANSFORMED: list[dict[str, Any]] = [
    {"presence_penalty": 1.0, "history": [1, 2], "prompt_len": 2},
    {"logit_bias": {4: 2.0}, "temperature": 0.7, "logprobs": 1},
    {"allowed_token_ids": [1, 2, 3]},
]


def device_verifier(slots: SlotTable, mode: LogprobsMode) -> DeviceVerifier:
    bitmasks = BitmaskBuffer(MOST, VOCAB, slots.device)
    return DeviceVerifier(slots, MOST, mode, bitmasks, SampledOutputs(2 * MOST, BufferRing(slots.device)))


def verified(
    on_device: bool, owners: list[dict[str, Any]], proposed: list[list[int]], logits: Tensor, mode: LogprobsMode,
    masks: TokenBitmasks,
) -> tuple[Result, list[Any]]:  # fmt: skip
    """The result, and what the table holds afterwards."""
    slots = table(owners)
    slots.host.max_lengths[:-1] = 10
    step = verifying(slots, proposed, masks.rows)
    on_host = Verifier(slots, mode, BitmaskBuffer(MOST, VOCAB, slots.device))
    verifier = device_verifier(slots, mode) if on_device else on_host
    verifier.begin(step)
    if (late := late_columns(step)) is not None:
        step.late_columns = torch.from_numpy(late)
    handle = verifier.verify(step, logits.clone())
    if masks.rows:
        assert isinstance(handle, MaskedStepHandle)
        handle.submit_bitmasks(masks)
    result = handle.result()
    failed = {place for place, _ in result.errors}
    fine = [slot for slot in range(len(owners)) if slot not in failed]
    columns = [slots.length, slots.last_token, slots.num_sampled, torch.from_numpy(slots.host.max_lengths)]
    return result, [column[fine].tolist() for column in columns]


def compare(seed: int, mode: LogprobsMode) -> int:
    """A random step; how many drafts were accepted."""
    rng = random.Random(seed)
    owners, proposed = [], list[list[int]]()
    for row in range(rng.randint(1, 8)):
        transformed = rng.random() < 0.3
        owners.append({"seed": seed * 10 + row, **rng.choice(TRANSFORMED if transformed else PLAIN)})
        right = [] if transformed else alone(owners[-1], 4)[: rng.randint(0, 4)]
        proposed.append(right + [rng.randrange(VOCAB) for _ in range(0 if transformed else rng.randint(0, 2))])
    before = [token for row in proposed for token in (START, *row)]
    logits = NEXT[torch.tensor(before)]
    if rng.random() < 0.3:
        logits[rng.randrange(len(logits))] = float("nan")
    rows = [row for row in range(len(owners)) if rng.random() < 0.3] if seed % 2 else []
    counts = [rng.randint(1, 1 + len(proposed[row])) for row in rows]
    bits = [bytes([rng.randrange(1, 256), 0, 0, 0]) for _ in range(sum(counts))]
    masks = TokenBitmasks(1, rows, bits, counts)
    ours, theirs = (verified(each, owners, proposed, logits, mode, masks) for each in (True, False))
    assert ours[1] == theirs[1]
    for name in ("counts", "tokens", "errors", "drafted"):
        assert getattr(ours[0], name) == getattr(theirs[0], name)
    for mine, other in zip(ours[0].logprobs, theirs[0].logprobs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert (mine.rank, mine.top_ids) == (other.rank, other.top_ids)
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
    return sum(ours[0].counts) - len(owners)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_the_device_decides_as_the_host_does(mode: LogprobsMode) -> None:
    assert sum(max(0, compare(seed, mode)) for seed in range(60)) > 40


@pytest.mark.parametrize("bug", ["one too many", "the first counter for all"])
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_too_many(*given: Any) -> None:
        tokens, faults, next_drafts, ends, slots, most, *columns = given
        place = ends - 1
        others = next_drafts.clone()
        others[place[1:] - 1] = tokens[place[1:] - 1]
        reference.verify_drafts(tokens, faults, others, ends, slots, most, *columns)

    def first_counter(slots: Tensor, offsets: Tensor, *others: Any) -> None:
        reference.position_columns(slots, torch.zeros_like(offsets), *others)

    bugs: dict[str, tuple[str, Callable[..., None]]] = {
        "one too many": ("verify_drafts", one_too_many),
        "the first counter for all": ("position_columns", first_counter),
    }
    op, wrong = bugs[bug]
    monkeypatch.setattr(reference, "_wrong", wrong, raising=False)
    monkeypatch.setitem(KERNELS, (op, "cpu"), "quire.compute.kernels.reference.drafts:_wrong")
    with pytest.raises(AssertionError):
        test_the_device_decides_as_the_host_does("raw_logprobs")
