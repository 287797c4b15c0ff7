"""The steps by which a draft model proposes drafts, one after another, and tokens that only the device knows.

Where the host computes, each step is over when the next one begins. On a device that runs ahead of the host, all are
launched one behind another on the stream of the model's, and drafts stay on the device: a step of the draft model
writes down what it samples as drafts of the model's slots, whose next step reads them from there. That step writes down
what it has sampled, with which the draft model goes on. So both can be launched before the host has seen a token. In
plans such tokens are named by where they stand; see `look_up_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.drafts import FIRST_NAMED
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.step import StepInputs
from quire.runtime.worker.steps_in_flight import MAX_STEPS_IN_FLIGHT

if TYPE_CHECKING:
    from quire.runtime.worker.model_runner import ModelRunner

Tokens = Sequence[Sequence[int]]


def steps_in_flight(drafts: int) -> int:
    """How many steps of the draft model may be launched before the oldest one is done, for so many drafts: all that go
    with the model's steps in flight, and changes of slots before each of these."""
    return MAX_STEPS_IN_FLIGHT * (drafts + 1)


class DraftSteps:
    """Runs the steps of a draft model.

    Args:
        runner: Of the draft model. No more than `steps_in_flight` of its steps are in flight.
        followed: On a device that runs ahead of the host, the slots of the model that drafts are for. Then nothing here
            waits for the device, unless drafts are read. None on any other device.
    """

    def __init__(self, runner: ModelRunner, followed: SlotTable | None = None) -> None:
        self._runner = runner
        self.followed = followed

    def change(self, plan: Plan) -> None:
        """Make the changes of a plan without rows, without waiting for them."""
        self._runner.launch(plan)

    def rewind(self, slots: Sequence[int], lengths: Sequence[int], num_sampled: Sequence[int], recent: Tokens) -> None:
        """Set slots to these lengths and numbers of sampled tokens, whatever they have computed and sampled beyond.
        `recent` are all their tokens; a device that runs ahead is given the last ones of each."""
        self._runner.rewind(slots, lengths, num_sampled)
        if self.followed is not None:
            lines = [_last_of(tokens, self.followed.recent.shape[1]) for tokens in recent]
            columns = np.array([[slot, *line] for slot, line in zip(slots, lines, strict=True)])
            where = upload(columns, self.followed.device)
            self.followed.recent.index_copy_(0, where[:, 0], where[:, 1:])

    def follow(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Let slots go on behind a step of the model that still runs. The host notes the most tokens that each may
        have; the device finds out how many there really are."""
        self._runner.slots.host.max_lengths[list(slots)] = lengths

    def draft(self, first: Plan, counts: Sequence[int], *, read: bool) -> Tokens | None:
        """Draft `counts` tokens for the sampled rows of a step: the first is what the step samples, and each next one
        follows from those before. Returns the drafts; None: there are as many, and they stay on the device, unless
        `read` asks for them on the host.

        On a device that runs ahead, all rows have as many drafts as the one that has most. What goes beyond a row's own
        number is not verified.
        """
        slots = [first.slots[row] for row in first.sampled_rows]
        if self.followed is None:
            return self._one_by_one(first, slots, counts)
        self._runner.launch_drafting(first)
        if (further := max(counts, default=0) - 1) > 0:
            self._runner.launch_drafting(_next_step(slots), further)
        if not read:
            return None
        lines = self.followed.drafts[upload(np.array(slots), self.followed.device)].tolist()
        return [line[:count] for line, count in zip(lines, counts, strict=True)]

    def _one_by_one(self, plan: Plan, slots: list[int], counts: Sequence[int]) -> Tokens:
        """Run one step after another until each slot has `counts` drafts, or has failed."""
        drafts: list[list[int]] = [[] for _ in slots]
        going_on = list(range(len(slots)))
        while True:
            result = self._runner.launch(plan).result()
            sampled = iter(result.tokens)
            found = [place for place, count in zip(going_on, result.counts, strict=True) if count]
            for place in found:  # behind a row that failed nothing means anything
                drafts[place].append(next(sampled))
            going_on = [place for place in found if len(drafts[place]) < counts[place]]
            if not going_on:
                return drafts
            plan = _next_step([slots[place] for place in going_on])


class DeviceTokens:
    """Looks up tokens that only the device knows, in steps whose rows may name some: drafts, in steps of the model; and
    in those of its draft model, which write drafts, what the model has sampled last.

    Args:
        slots: Those of the steps.
        followed: Of a draft model, the slots of the model; None: the steps are the model's.
        is_head: Whether the draft model is a head, which has each sequence without its first token.
    """

    def __init__(self, slots: SlotTable, followed: SlotTable | None = None, *, is_head: bool = False) -> None:
        device = slots.device.type
        self._slots = slots
        self._followed = followed
        self._known = slots.drafts if followed is None else followed.recent
        self._before = self._known.shape[1] - 1 + is_head  # the model has not computed the last token of `recent`
        self._look_up_tokens = kernel("look_up_tokens", device)
        self._follow_slots = kernel("follow_slots", device)
        self._note_drafts = kernel("note_drafts", device)

    def begin(self, inputs: StepInputs) -> None:
        """Begin a step, before the lengths of its slots are read."""
        own, followed = self._slots, self._followed
        if followed is not None:
            self._follow_slots(
                inputs.slots, inputs.row_of_token, inputs.offsets, inputs.token_ids, followed.length,
                followed.num_sampled, self._before, own.length, own.num_sampled,
            )  # fmt: skip

    def look_up(self, ids: Tensor, slots: Tensor, out: Tensor) -> None:
        """Put into `out` the tokens that `ids` name by their place in the line of their slot; all are [n] int64."""
        self._look_up_tokens(ids, slots, self._known, out)

    def sampled(self, slots: Tensor) -> None:
        """Take in that a step has sampled a token for each of these slots, [rows]."""
        own, followed = self._slots, self._followed
        if followed is not None:
            self._note_drafts(slots, own.last_token, own.num_sampled, followed.num_sampled, followed.drafts)


def _last_of(tokens: Sequence[int], width: int) -> list[int]:
    """The last `width` tokens; where there are fewer, zeros come first."""
    last = list(tokens[-width:])
    return [0] * (width - len(last)) + last


def last_tokens(number: int, width: int) -> list[int]:
    """Names of the last tokens of a sequence whose model has sampled them in steps that are not done yet; see
    SlotTable.recent, whose lines are so wide."""
    return [FIRST_NAMED - place for place in range(width - number, width)]


def _next_step(slots: Iterable[int]) -> Plan:
    """A plan that computes one more token of each slot, and samples the next."""
    rows = list(slots)
    return Plan(step=0, slots=rows, counts=[1] * len(rows), sampled_rows=list(range(len(rows))))
