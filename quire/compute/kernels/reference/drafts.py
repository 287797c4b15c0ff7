"""Drafts: those that only the device knows, what each position is sampled with, and how far each row's drafts stay."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.reference.sample import SamplingColumns

FIRST_NAMED = -2
"""An id that stands for a token which only the device knows: this one for the first in a line of a table, the next
lower one for the second, and so on."""


def look_up_tokens(ids: Tensor, slots: Tensor, known: Tensor, out: Tensor) -> None:
    """Put tokens that only the device knows in place of the ids that name them.

    Args:
        ids: [n] int64, see FIRST_NAMED; of higher ones `out` stays as it is. May be `out` itself.
        slots: [n] int64, in whose line of `known` each stands.
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
    """Before a row that begins with a named token (see FIRST_NAMED), its slot is put where another table's slot is now,
    less what the row is going to read again: all tokens from the named one on.

    Args:
        slots: [rows] int64.
        row_of_token, offsets, ids: [tokens] int64, as in `prepare_inputs`.
        followed_length, followed_drawn: [slots] int64, columns of the other table.
        before: What the slot has less than the other one, where its row begins with the first token of the line.
        length, drawn: [slots] int64, changed.
    """
    first = ((offsets == 0) & (ids <= FIRST_NAMED)).nonzero()[:, 0]
    own = slots[row_of_token[first]]
    length[own] = followed_length[own] - before + FIRST_NAMED - ids[first]
    drawn[own] = followed_drawn[own]


def note_drafts(slots: Tensor, last: Tensor, drawn: Tensor, drawn_before: Tensor, drafts: Tensor) -> None:
    """Write down each slot's last token as the draft that it is: the first one that was drawn since `drawn_before`, the
    second, and so on.

    Args:
        slots: [rows] int64. Several may be the dummy's, but nobody else's.
        last, drawn: [slots] int64, columns of the table whose slots draw drafts.
        drawn_before: [slots] int64, the counters of those that verify them.
        drafts: [slots, width] int64, changed; what is not within its width is left out.
    """
    place = drawn[slots] - drawn_before[slots] - 1
    fits = ((place >= 0) & (place < drafts.shape[1])).nonzero()[:, 0]
    own = slots[fits]
    drafts[own, place[fits]] = last[own]


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
    """Move each row's slot to what it gains: the tokens up to the first that is not the draft behind it.

    Args:
        tokens: [positions] int64, sampled; one row's behind another's.
        faults: [positions] int8; no draft stays behind one.
        next_drafts: [positions] int64, the draft that stands behind each; below 0: none does, as behind a row's last.
        ends: [rows] int64, where each row's positions end; nothing becomes of rows that have none.
        slots: [positions] int64, each slot in one row.
        length, last, drawn: [slots] int64, columns of the slot table, changed. `length` has moved by all positions.
        recent: [slots, width] int64, the last tokens of each slot, changed: those that are gained follow. No row has
            more than `width` positions.
        counts: [rows] int64, out: how many each gains.
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
