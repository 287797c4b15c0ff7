"""The end of a step with masked rows by the device's kernels: the same as by the references, on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.compute.kernels.dispatch import KERNELS
from quire.foundation.messages.workers import Result, TokenBitmasks
from quire.runtime.worker import buffer_ring
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.sampling.logprobs import LogprobsMode
from quire.runtime.worker.sampling.sampler import Sampler
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.staging_buffer import StagingBuffer
from quire.runtime.worker.step_handle import MaskedStepHandle, StepTimers
from quire.runtime.worker.step_stager import late_columns
from tests.worker.driver import admitted
from tests.worker.steps import sampling

VOCAB = 1_003
STEPS = 3
OPS = ("sample", "apply_token_bitmask", "token_logprobs", "apply_penalties", "count_sampled", "init_slots")
COPIES = ("copy_inputs_from_host", "copy_outputs_to_host")
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"seed": 3, "top_p": 0.9, "logprobs": 3},
    {"seed": 4, "temperature": 9.0, "min_p": 0.05},
    {"temperature": 0.0, "logprobs": 0},
    {"seed": 5},
]
TRANSFORMED: list[dict[str, Any]] = [
    {"seed": 6, "presence_penalty": 1.5, "frequency_penalty": 0.5, "history": [5, 6, 7, 7, 8], "prompt_len": 2},
    {"seed": 7, "repetition_penalty": 1.3, "history": [9, 9, 1], "prompt_len": 1, "top_k": 9},
    {"temperature": 0.0, "allowed_token_ids": list(range(300)), "logprobs": 2},
    {"seed": 8, "min_tokens": 2, "stop_ids": [3, 4], "temperature": 4.0},
    {"seed": 9, "bad_words": [[20], [30, 31]], "history": [5, 30], "prompt_len": 1},
]
EVERYTHING = PLAIN + TRANSFORMED


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
@pytest.mark.parametrize(
    ("owners", "masked"),
    [
        (PLAIN, range(len(PLAIN))),
        (PLAIN, [1, 2, 5]),
        (EVERYTHING, [0, 2, 7, 8, 9, 10, 11]),  # positions that are not masked have no transforms
        (EVERYTHING, [3, 8, 10]),
        (EVERYTHING, range(len(EVERYTHING))),
    ],
)
def test_masked_rows_are_sampled_as_by_the_references(
    owners: list[dict[str, Any]], masked: Any, mode: LogprobsMode, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results("cpu", owners, list(masked), mode)
    if device == "cpu":
        for op in (*OPS, *COPIES):
            monkeypatch.setitem(KERNELS, (op, "cpu"), KERNELS[op, "cuda"])
        monkeypatch.setattr(buffer_ring, "_has_memory", lambda device: True)
    found = results(device, owners, list(masked), mode)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one.counts, one.tokens, one.errors) == (other.counts, other.tokens, other.errors)
        assert len(one.errors) == (2 if step == 1 else 0)
        for entry, same in zip(one.logprobs, other.logprobs, strict=True):
            assert (entry is None) == (same is None)
            if entry is not None and same is not None:
                assert (entry.rank, entry.top_ids) == (same.rank, same.top_ids)
                assert entry.logprob == pytest.approx(same.logprob, abs=1e-4)
        bits = masks_of(step, len(masked))
        tokens = iter(one.tokens)
        for position, count in enumerate(one.counts):
            token = next(tokens) if count else -1
            if count and position in masked:
                mask = bits[list(masked).index(position)]
                assert mask[token // 8] >> token % 8 & 1


def masks_of(step: int, number: int) -> list[bytes]:
    """Half of all tokens; in step 1 the first allows none."""
    rng = np.random.default_rng(step)
    masks = [rng.bytes(4 * -(-VOCAB // 32)) for _ in range(number)]
    return [bytes(len(masks[0])), *masks[1:]] if step == 1 else masks


def results(device: str, owners: list[dict[str, Any]], masked: list[int], mode: LogprobsMode) -> list[Result]:
    """Of some steps that sample for all owners; in step 1 one masked row is not a number."""
    slots, rows = SlotTable(len(owners), 1, 1, VOCAB, torch.device(device)), np.arange(len(owners))
    ring = BufferRing(slots.device)
    staging, timers = StagingBuffer(4_096, ring), StepTimers(slots.device)
    sampler = Sampler(slots, len(owners), mode, ring)
    generator = torch.Generator().manual_seed(len(owners))
    found = []
    with torch.inference_mode():
        admit(slots, owners)
        for step in range(STEPS):
            logits = (torch.randn(len(owners), VOCAB, generator=generator) * 3).bfloat16()
            if step == 1:
                logits[masked[1]] = torch.nan
            logits = logits.to(device)
            each = sampling(slots, len(owners), step, masked)
            each.timer = timers.start()
            sampler.begin(each)
            early = rows.copy()
            early[each.late] = slots.dummy
            columns = late_columns(each)
            assert columns is not None
            copied = staging.begin()
            where, zero_copy = copied.add(early), copied.end()
            each.late_columns = zero_copy.add(columns)
            zero_copy.finish().copy_to_device()
            sampler.sample(logits, where)
            handle = sampler.end(each, logits, lambda: None)
            assert isinstance(handle, MaskedStepHandle)
            assert not handle.done()
            handle.submit_bitmasks(TokenBitmasks(step, masked, masks_of(step, len(masked))))
            found.append(handle.result())
        own: Tensor = slots.num_sampled[: len(owners)]
        assert own.tolist() == [STEPS] * len(owners)
    return found


def admit(slots: SlotTable, owners: list[dict[str, Any]]) -> None:
    """What a plan's columns do is done here, since they travel by themselves."""
    new = [admitted(i, **{"seed": 0, "num_sampled": 0} | owner) for i, owner in enumerate(owners)]
    slots.admit(new)
    columns = {
        "temperature": [0.0 if owner.sampling.greedy else owner.sampling.temperature for owner in new],
        "top_p": [owner.sampling.top_p for owner in new],
        "min_p": [owner.sampling.min_p for owner in new],
        "top_k": [owner.sampling.top_k for owner in new],
        "seed": [owner.seed for owner in new],
    }
    for name, values in columns.items():
        getattr(slots, name)[: len(new)] = torch.tensor(values).to(slots.device)
