"""Drafts that stay on the device: the draft model's slots and the model's tell each other what the host does not know.

A step of the draft model writes down what it samples as drafts of the model's slots, whose next step reads them from
there. That step writes down what it has sampled, with which the draft model goes on. So both can be launched before the
host has seen a token. In plans such tokens are named by where they stand; see `look_up_tokens`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.step import StepInputs


class DeviceTokens(Protocol):
    """Is asked for tokens that only the device knows, in steps whose rows may name some."""

    def begin(self, inputs: StepInputs) -> None:
        """Begin a step, before the lengths of its slots are read."""
        ...

    def look_up(self, ids: Tensor, slots: Tensor, out: Tensor) -> None:
        """Put into `out` the tokens that `ids` name by their place in the line of their slot; all are [n] int64."""
        ...

    def sampled(self, slots: Tensor) -> None:
        """Take in that a step has sampled a token for each of these slots, [rows]."""
        ...


class DraftsToVerify:
    """DeviceTokens of the model: its steps name drafts.

    Args:
        slots: The model's.
    """

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._look_up_tokens = kernel("look_up_tokens", slots.device.type)

    def begin(self, inputs: StepInputs) -> None:
        return

    def look_up(self, ids: Tensor, slots: Tensor, out: Tensor) -> None:
        self._look_up_tokens(ids, slots, self._slots.drafts, out)

    def sampled(self, slots: Tensor) -> None:
        return


class FollowedTokens:
    """DeviceTokens of the draft model: its steps name what the model has sampled last, and sample drafts.

    Args:
        slots: Its own.
        followed: The model's slots.
        is_head: Whether it is a head, which has each sequence without its first token.
    """

    def __init__(self, slots: SlotTable, followed: SlotTable, *, is_head: bool) -> None:
        device = slots.device.type
        self._slots, self._followed = slots, followed
        width = followed.recent.shape[1]
        self._before = width - 1 + is_head  # the last token of `recent` is one that the model has not computed
        self._look_up_tokens = kernel("look_up_tokens", device)
        self._follow_slots = kernel("follow_slots", device)
        self._note_drafts = kernel("note_drafts", device)

    def begin(self, inputs: StepInputs) -> None:
        own, followed = self._slots, self._followed
        self._follow_slots(
            inputs.slots, inputs.row_of_token, inputs.offsets, inputs.token_ids, followed.length, followed.num_sampled,
            self._before, own.length, own.num_sampled,
        )  # fmt: skip

    def look_up(self, ids: Tensor, slots: Tensor, out: Tensor) -> None:
        self._look_up_tokens(ids, slots, self._followed.recent, out)

    def sampled(self, slots: Tensor) -> None:
        own, followed = self._slots, self._followed
        self._note_drafts(slots, own.last_token, own.num_sampled, followed.num_sampled, followed.drafts)
