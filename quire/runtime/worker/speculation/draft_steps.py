"""The draft model's worker: the steps by which it proposes drafts, one after another.

Where the host computes, each step is over when the next one begins. On a device that runs ahead, all are launched one
behind another on the stream of the model's, and their drafts stay on the device: see `device_drafts.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.compute.kernels.reference.drafts import FIRST_NAMED
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.steps_in_flight import MAX_STEPS_IN_FLIGHT

if TYPE_CHECKING:
    from quire.runtime.worker.model_runner import ModelRunner

Tokens = Sequence[Sequence[int]]


def steps_in_flight(drafts: int) -> int:
    """How many steps of the draft model may be launched before the oldest one is done, for so many drafts: all that go
    with the model's steps in flight, and changes of slots before each of these."""
    return MAX_STEPS_IN_FLIGHT * (drafts + 1)


class DraftSteps:
    """A DraftWorker where the host computes.

    Args:
        runner: Of the draft model.
    """

    follows = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def change(self, plan: Plan) -> None:
        """Make the changes of a plan without rows."""
        self._runner.launch(plan)

    def rewind(self, slots: Sequence[int], lengths: Sequence[int], num_sampled: Sequence[int], recent: Tokens) -> None:
        """Set slots to these lengths, and to these numbers of sampled tokens. `recent` is not needed: the host knows
        all tokens."""
        self._runner.rewind(slots, lengths, num_sampled)

    def follow(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        raise AssertionError("the host knows all tokens")

    def draft(self, first: Plan, counts: Sequence[int], *, read: bool) -> Tokens:
        """Run one step after another until each sampled row has `counts` drafts, or has failed; returns the drafts."""
        slots = [first.slots[row] for row in first.sampled_rows]
        drafts: list[list[int]] = [[] for _ in slots]
        plan, going_on = first, list(range(len(slots)))
        while True:
            result = self._runner.launch(plan).result()
            sampled = iter(result.tokens)
            found = [place for place, count in zip(going_on, result.counts, strict=True) if count]
            for place in found:  # behind a row that failed nothing means anything
                drafts[place].append(next(sampled))
            going_on = [place for place in found if len(drafts[place]) < counts[place]]
            if not going_on:
                return drafts
            plan = next_step([slots[place] for place in going_on])


class DraftStepsAhead:
    """A DraftWorker on a device that runs ahead of the host: nothing here waits for it, unless drafts are read.

    All rows have as many drafts as the one that has most. What goes beyond a row's own number is not verified.

    Args:
        runner: Of the draft model. No more than `steps_in_flight` of its steps are in flight.
        followed: The slots of the model that drafts are for.
    """

    follows = True

    def __init__(self, runner: ModelRunner, followed: SlotTable) -> None:
        self._runner = runner
        self._followed = followed
        self._width = followed.recent.shape[1]

    def change(self, plan: Plan) -> None:
        """Make the changes of a plan without rows, without waiting for them."""
        self._runner.launch(plan)

    def rewind(self, slots: Sequence[int], lengths: Sequence[int], num_sampled: Sequence[int], recent: Tokens) -> None:
        """Set slots to these lengths and numbers of sampled tokens, and give the device the last tokens of each."""
        self._runner.rewind(slots, lengths, num_sampled)
        lines = [_last_of(tokens, self._width) for tokens in recent]
        columns = np.array([[slot, *line] for slot, line in zip(slots, lines, strict=True)])
        where = upload(columns, self._followed.device)
        self._followed.recent.index_copy_(0, where[:, 0], where[:, 1:])

    def follow(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Let slots go on behind a step that still runs. The host notes the most tokens that each may have; the device
        finds out how many there really are."""
        self._runner.slots.host.max_lengths[list(slots)] = lengths

    def draft(self, first: Plan, counts: Sequence[int], *, read: bool) -> Tokens | None:
        """Launch the steps that draft `counts` tokens for each sampled row. Returns the drafts if `read` asks for them;
        else None, and they stay on the device."""
        slots = [first.slots[row] for row in first.sampled_rows]
        self._runner.launch_drafting(first)
        if (further := max(counts, default=0) - 1) > 0:
            self._runner.launch_drafting(next_step(slots), further)
        if not read:
            return None
        lines = self._followed.drafts[upload(np.array(slots), self._followed.device)].tolist()
        return [line[:count] for line, count in zip(lines, counts, strict=True)]


def _last_of(tokens: Sequence[int], width: int) -> list[int]:
    """The last `width` tokens; where there are fewer, zeros come first."""
    last = list(tokens[-width:])
    return [0] * (width - len(last)) + last


def last_tokens(number: int, width: int) -> list[int]:
    """Names of the last tokens of a sequence whose model has sampled them in steps that are not done yet; see
    SlotTable.recent, whose lines are so wide."""
    return [FIRST_NAMED - place for place in range(width - number, width)]


def next_step(slots: Iterable[int]) -> Plan:
    """A plan that computes one more token of each slot, and samples the next."""
    rows = list(slots)
    return Plan(step=0, slots=rows, counts=[1] * len(rows), sampled_rows=list(range(len(rows))))
