"""Speculative drafts: ids that only the device knows, sampling of each position, and verification."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.reference.sample import SamplingColumns

FIRST_NAMED = -2
"""The id that stands for the first token in a line of a table that only the device knows.

The next lower id stands for the second token, and so on.
"""


def look_up_tokens(ids: Tensor, slots: Tensor, known: Tensor, out: Tensor) -> None:
    """Replace ids that name tokens which only the device knows.

    Args:
        ids: [n] int64, with names as in FIRST_NAMED; `out` keeps its value for all other ids. May be `out` itself.
        slots: [n] int64, the line of `known` for each id.
        known: [slots, width] int64.
        out: [n] int64, changed.
    """
    places = FIRST_NAMED - ids
    named = known[slots, places.clamp(min=0)]
    out.copy_(torch.where(places >= 0, named, out))


def follow_slots(
    slots: Tensor,
    row_of_token: Tensor,
    offsets: Tensor,
    ids: Tensor,
    followed_length: Tensor,
    followed_drawn: Tensor,
    before: int,
    length: Tensor,
    drawn: Tensor,
) -> None:
    """Move slots of rows that begin with a named token (FIRST_NAMED) to where another table's slots are.

    The slot is moved back by the tokens that the row will read again: all tokens from the named one on.

    Args:
        slots: [rows] int64.
        row_of_token, offsets, ids: [tokens] int64, as in `prepare_inputs`.
        followed_length, followed_drawn: [slots] int64, columns of the other table.
        before: How far the slot is behind the other one if its row begins with the first token of the line.
        length, drawn: [slots] int64, changed.
    """
    first = ((offsets == 0) & (ids <= FIRST_NAMED)).nonzero()[:, 0]
    own = slots[row_of_token[first]]
    length[own] = followed_length[own] - before + FIRST_NAMED - ids[first]
    drawn[own] = followed_drawn[own]


def note_drafts(slots: Tensor, last: Tensor, drawn: Tensor, drawn_before: Tensor, drafts: Tensor) -> None:
    """Store each slot's last token as a draft, at the place that the tokens drawn since `drawn_before` give it.

    Args:
        slots: [rows] int64. Only the dummy slot may appear several times.
        last, drawn: [slots] int64, columns of the table whose slots draw drafts.
        drawn_before: [slots] int64, the counters of the slots that verify the drafts.
        drafts: [slots, width] int64, changed; drafts outside its width are left out.
    """
    place = drawn[slots] - drawn_before[slots] - 1
    fits = ((place >= 0) & (place < drafts.shape[1])).nonzero()[:, 0]
    own = slots[fits]
    drafts[own, place[fits]] = last[own]


def position_columns(slots: Tensor, offsets: Tensor, asked: SamplingColumns, out: SamplingColumns) -> None:
    """Copy, for each position, its slot's sampling parameters and the counter that its token will have.

    Args:
        slots: [positions] int64, each position's slot.
        offsets: [positions] int64, each position's place in its row.
        asked: The parameters, by slot.
        out: The parameters, by position, of the same types.
    """
    for column, own in zip(asked, out, strict=True):
        torch.index_select(column, 0, slots, out=own)
    out.drawn.add_(offsets)


def verify_drafts(
    tokens: Tensor,
    faults: Tensor,
    next_drafts: Tensor,
    ends: Tensor,
    slots: Tensor,
    length: Tensor,
    last: Tensor,
    drawn: Tensor,
    recent: Tensor,
    counts: Tensor,
) -> None:
    """Move each row's slot by its accepted tokens: those up to the first that differs from the draft behind it.

    Args:
        tokens: [positions] int64, sampled, row by row.
        faults: [positions] int8; drafts behind a fault are not accepted.
        next_drafts: [positions] int64, the draft behind each position; below 0: there is none, as behind a row's last.
        ends: [rows] int64, where each row's positions end; rows without positions are left out.
        slots: [positions] int64, each slot in one row.
        length, last, drawn: [slots] int64, columns of the slot table, changed. `length` has moved by all positions.
        recent: [slots, width] int64, the last tokens of each slot; the accepted ones are appended. No row has more than
            `width` positions.
        counts: [rows] int64, out: the number of tokens that each row gains.
    """
    first = torch.cat((ends.new_zeros(1), ends[:-1]))
    some = ends > first
    first, ends = first[some], ends[some]
    place, goes_on = first.clone(), torch.ones_like(first, dtype=torch.bool)
    for _ in range(recent.shape[1] - 1):
        goes_on &= (tokens[place] == next_drafts[place]) & (faults[place] == 0)
        place = torch.where(goes_on, place + 1, place)
    own, gained = slots[first], place - first + 1
    last.index_copy_(0, own, tokens[place])
    drawn.index_add_(0, own, gained)
    length.index_add_(0, own, gained - (ends - first))
    counts[some] = gained
    width = recent.shape[1]
    at = torch.arange(width, device=tokens.device) + gained[:, None]  # in what a slot has had, and then what it gains
    behind = tokens[(first[:, None] + at - width).clamp(0, len(tokens) - 1)]
    recent[own] = torch.where(at < width, recent[own].gather(1, at.clamp(max=width - 1)), behind)
