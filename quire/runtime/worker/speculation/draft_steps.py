"""Runs a draft model's steps, and looks up tokens that only the device knows.

On a CPU each step ends before the next one begins. On a device that runs ahead of the host, all steps are launched on
the main model's stream, and drafts stay on the device: the draft model writes its drafts to the main model's slots,
whose next step reads them. That step writes what it has sampled, and the draft model continues from there. So both are
launched before the host has seen a token. Plans name these tokens by negative numbers, which `look_up_tokens` resolves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.drafts import FIRST_NAMED
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.async_scheduling import MAX_STEPS_IN_FLIGHT
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.step import StepInputs

if TYPE_CHECKING:
    from quire.runtime.worker.model_runner import ModelRunner

Tokens = Sequence[Sequence[int]]


def steps_in_flight(drafts: int) -> int:
    """Return how many steps of the draft model may be in flight for `drafts` drafts: all that belong to the main
    model's steps in flight, and one change of slots before each of these."""
    return MAX_STEPS_IN_FLIGHT * (drafts + 1)


class DraftSteps:
    """Runs the steps of a draft model, whose runner allows `steps_in_flight` steps in flight. On a device that runs
    ahead, `followed` are the main model's slots, and the device is waited for only if drafts are read."""

    def __init__(self, runner: ModelRunner, followed: SlotTable | None = None) -> None:
        self.runner = runner
        self.followed = followed

    def rewind(self, slots: Sequence[int], lengths: Sequence[int], num_sampled: Sequence[int], recent: Tokens) -> None:
        """Reset slots to these lengths and numbers of sampled tokens. `recent` has all tokens of each sequence; a
        device that runs ahead receives the last ones."""
        self.runner.slots.rewind(slots, lengths, num_sampled)
        if self.followed is not None:
            width = self.followed.recent.shape[1]
            lines = [[*[0] * width, *tokens[-width:]][-width:] for tokens in recent]
            columns = np.array([[slot, *line] for slot, line in zip(slots, lines, strict=True)])
            where = upload(columns, self.followed.device)
            self.followed.recent.index_copy_(0, where[:, 0], where[:, 1:])

    def follow(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Let slots continue behind a step of the main model that still runs. `lengths` are the maximum lengths, for
        the host; the device knows the real ones."""
        self.runner.slots.host.max_lengths[list(slots)] = lengths

    def draft(self, first: Plan, counts: Sequence[int], *, read: bool) -> Tokens | None:
        """Draft `counts` tokens for the sampled rows of `first`, which samples the first draft of each row. Returns
        None if the drafts stay on the device and `read` does not ask for them.

        On a device that runs ahead, all rows get the maximum of `counts`; drafts beyond a row's own count are not
        verified.
        """
        slots = [first.slots[row] for row in first.sampled_rows]
        if self.followed is None:
            return self._one_by_one(first, slots, counts)
        self.runner.launch_drafting(first)
        if (further := max(counts, default=0) - 1) > 0:
            self.runner.launch_drafting(_next_step(slots), further)
        if not read:
            return None
        lines = self.followed.drafts[upload(np.array(slots), self.followed.device)].tolist()
        return [line[:count] for line, count in zip(lines, counts, strict=True)]

    def _one_by_one(self, plan: Plan, slots: list[int], counts: Sequence[int]) -> Tokens:
        """Run step after step until each slot has `counts` drafts, or has failed."""
        drafts: list[list[int]] = [[] for _ in slots]
        going_on = list(range(len(slots)))
        while True:
            result = self.runner.launch(plan).result()
            sampled = iter(result.tokens)
            found = [place for place, count in zip(going_on, result.counts, strict=True) if count]
            for place in found:  # behind a row that failed nothing means anything
                drafts[place].append(next(sampled))
            going_on = [place for place in found if len(drafts[place]) < counts[place]]
            if not going_on:
                return drafts
            plan = _next_step([slots[place] for place in going_on])


class DeviceTokens:
    """Looks up tokens that only the device knows. The main model's steps read drafts; the draft model's steps read what
    the main model sampled last, and write drafts.

    Args:
        slots: Slots of the steps' model.
        followed: Slots of the main model, if the steps are a draft model's; otherwise None.
        is_head: Whether the draft model is a head, whose sequences lack their first token.
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
        """Write to `out` the tokens that `ids` name by their index in their slot's row; all are [n] int64."""
        self._look_up_tokens(ids, slots, self._known, out)

    def sampled(self, slots: Tensor) -> None:
        """Note that a step has sampled a token for each of these slots, [rows]."""
        own, followed = self._slots, self._followed
        if followed is not None:
            self._note_drafts(slots, own.last_token, own.num_sampled, followed.num_sampled, followed.drafts)


def last_tokens(number: int, width: int) -> list[int]:
    """Return names of a sequence's last `number` tokens, which are in `SlotTable.recent`, `width` entries wide, and
    which the host may not know yet."""
    return [FIRST_NAMED - place for place in range(width - number, width)]


def _next_step(slots: Iterable[int]) -> Plan:
    """Make a plan that computes one more token of each slot and samples the next."""
    rows = list(slots)
    return Plan(step=0, slots=rows, counts=[1] * len(rows), sampled_rows=list(range(len(rows))))
