"""Steps by themselves, as a model runner makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.foundation.messages.workers import Plan
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.step_drafts import StepDrafts
from quire.runtime.worker.step import Step, StepKind


def sampling(slots: SlotTable, rows: int, number: int = 1, masked: Sequence[int] = ()) -> Step:
    """A step that samples a token for each of the first `rows` slots; `masked` ones wait for their bitmasks."""
    every = list(range(rows))
    plan = Plan(step=number, slots=every, counts=[1] * rows, sampled_rows=every, masked=list(masked))
    return Step(plan, StepKind.SAMPLE, HostBatch.of(plan, slots.host.max_lengths))


def verifying(slots: SlotTable, proposed: Sequence[Sequence[int]], masked: Sequence[int] = ()) -> Step:
    """A step that verifies these drafts of the first slots, which it moves on by all of them; `masked` ones wait for
    their bitmasks."""
    every, drafts = list(range(len(proposed))), StepDrafts.of(proposed)
    numbers = drafts.counts.tolist()
    counts = [1 + number for number in numbers]
    plan = Plan(step=1, slots=every, counts=counts, sampled_rows=every, masked=list(masked), drafts=numbers)
    slots.length[every] += torch.tensor(counts)
    host = HostBatch.of(plan, slots.host.max_lengths, drafts)
    slots.host.max_lengths[every] += host.counts
    return Step(plan, StepKind.VERIFY, host, drafts=drafts)
