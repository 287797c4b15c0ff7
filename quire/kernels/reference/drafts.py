"""Verification of drafts: what each position is sampled with, and how far each row's drafts stay."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.reference.sample import SamplingColumns


def position_columns(slots: Tensor, offsets: Tensor, asked: SamplingColumns, out: SamplingColumns) -> None:
    """What each position is sampled with: its slot's parameters, and the counter that its token will have.

    Args:
        slots: [positions] int64, of each.
        offsets: [positions] int64, its place in its row.
        asked: By slot.
        out: By position, of the same types.
    """
    for column, own in zip(asked, out, strict=True):
        torch.index_select(column, 0, slots, out=own)
    out.drawn.add_(offsets)


def keep_drafts(
    tokens: Tensor,
    faults: Tensor,
    next_drafts: Tensor,
    ends: Tensor,
    slots: Tensor,
    most: int,
    length: Tensor,
    last: Tensor,
    drawn: Tensor,
) -> None:
    """Move each row's slot to what it gains: the tokens up to the first that is not the draft behind it.

    Args:
        tokens: [positions] int64, sampled; one row's behind another's.
        faults: [positions] int8; no draft stays behind one.
        next_drafts: [positions] int64, the draft that stands behind each; below 0: none does, as behind a row's last.
        ends: [rows] int64, where each row's positions end.
        slots: [positions] int64, each slot in one row.
        most: Drafts of the row that has most.
        length, last, drawn: [slots] int64, columns of the slot table, changed. `length` has moved by all positions.
    """
    assert most >= 0
    first = torch.cat((ends.new_zeros(1), ends[:-1]))
    place, goes_on = first.clone(), torch.ones_like(first, dtype=torch.bool)
    for _ in range(most):
        goes_on &= (tokens[place] == next_drafts[place]) & (faults[place] == 0)
        place = torch.where(goes_on, place + 1, place)
    own, gained = slots[first], place - first + 1
    last.index_copy_(0, own, tokens[place])
    drawn.index_add_(0, own, gained)
    length.index_add_(0, own, gained - (ends - first))
