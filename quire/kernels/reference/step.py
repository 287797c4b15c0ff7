"""The beginning of a step: where its rows stand, by the slot table."""

from __future__ import annotations

import torch
from torch import Tensor


def begin_step(
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
        slots, counts: [rows] int64; no slot but the dummy stands in two rows.
        row_of_token, offsets, ids: [tokens] int64; an id below 0 stands for what the row's slot drew last.
        length, last: [slots] int64, columns of the slot table; `length` is changed, the dummy's stays 0.
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
