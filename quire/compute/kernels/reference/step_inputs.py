"""The beginning of a step: who owns the slots of the slot table, and where the step's rows stand by it."""

from __future__ import annotations

import torch
from torch import Tensor


def prepare_inputs(
    slots: Tensor,
    counts: Tensor,
    row_of_token: Tensor,
    offsets: Tensor,
    ids: Tensor,
    length: Tensor,
    last: Tensor,
    dummy: int,
    starts: Tensor,
    positions: Tensor,
    slot_of_token: Tensor,
    tokens: Tensor,
) -> None:
    """Look up each row's start and each token's position, slot and id; move the slots' lengths on.

    Args:
        slots, counts: [rows] int64; only the dummy slot may have several rows.
        row_of_token, offsets, ids: [tokens] int64; an id below 0 stands for the token that the row's slot drew last.
        length, last: [slots] int64, columns of the slot table; `length` is changed, but the dummy's stays 0.
        dummy: The slot of padding.
        starts: [rows] out.
        positions, slot_of_token, tokens: [tokens] out.
    """
    torch.index_select(length, 0, slots, out=starts)
    torch.index_select(slots, 0, row_of_token, out=slot_of_token)
    torch.index_select(starts, 0, row_of_token, out=positions)
    positions.add_(offsets)
    tokens.copy_(torch.where(ids < 0, last.index_select(0, slot_of_token), ids))
    length.index_add_(0, slots, counts)
    length[dummy : dummy + 1].zero_()


def init_slots(slots: Tensor, ints: Tensor, floats: Tensor, of_ints: Tensor, of_floats: Tensor, tables: Tensor) -> None:
    """Give slots to new owners: write their columns of the slot table, and empty their block tables.

    Args:
        slots: [owners] int64, each once.
        ints, floats: [owners · columns] int64 and float64, the new values, owner by owner.
        of_ints, of_floats: [columns, slots] int64 and float32, changed.
        tables: [groups, slots, blocks] int64, changed.
    """
    of_ints.index_copy_(1, slots, ints.view(len(slots), -1).T)
    of_floats.index_copy_(1, slots, floats.view(len(slots), -1).T.float())
    tables.index_fill_(1, slots, 0)
