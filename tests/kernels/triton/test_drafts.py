"""Verification's ops in Triton against the reference: equal to the last bit, and nothing else is touched."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import drafts as reference
from quire.compute.kernels.reference.sample import SamplingColumns
from quire.compute.kernels.triton.drafts import (
    follow_slots,
    look_up_tokens,
    note_drafts,
    position_columns,
    verify_drafts,
)

POISON = -(2**40)
COUNTS = [[0], [3], [0, 4, 1, 0, 16], [2] * 200]


def positions(counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, offsets and ends of rows with so many drafts."""
    own = torch.randperm(len(counts) + 3, generator=torch.Generator().manual_seed(len(counts)))[: len(counts)]
    sizes = torch.tensor(counts) + 1
    return own.repeat_interleave(sizes), torch.cat([torch.arange(n) for n in sizes.tolist()]), sizes.cumsum(0)


@pytest.mark.parametrize("counts", COUNTS)
def test_position_columns(counts: list[int], device: str) -> None:
    slots, offsets, _ = positions(counts)
    number = len(counts) + 3

    def columns(n: int, fill: int | None = None) -> SamplingColumns:
        ints = torch.randint(-(2**62), 2**62, (3, n)) if fill is None else torch.full((3, n), fill)
        floats = torch.rand(3, n) if fill is None else torch.full((3, n), float(fill))
        own = [floats[0], ints[0], floats[1], floats[2], ints[1], ints[2]]
        return SamplingColumns(*(column.to(device) for column in own))

    asked, found = columns(number), []
    for op in (position_columns, reference.position_columns):
        out = columns(len(slots) + 1, POISON)
        op(slots.to(device), offsets.to(device), asked, SamplingColumns(*(column[:-1] for column in out)))
        assert all(column[-1] == POISON for column in out)
        found.append(out)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("counts", COUNTS)
def test_verify_drafts(counts: list[int], device: str) -> None:
    """By the definition, row by row; a fault ends a row, and what is no row's stays. Some rows are padding."""
    rng = random.Random(len(counts))
    slots, _, ends = positions(counts)
    width = max(counts) + 1
    recent = torch.randint(100, 2**33, (len(counts) + 3, width))
    tokens, drafts, faults = [rng.randrange(5) for _ in slots], [], [int(rng.random() < 0.05) for _ in slots]
    for place, token in enumerate(tokens):
        drafts.append(-1 if place + 1 in ends.tolist() else token if rng.random() < 0.7 else token + 1)
    table = torch.randint(100, 2**33, (3, len(counts) + 3))
    given = [torch.tensor(tokens), torch.tensor(faults, dtype=torch.int8), torch.tensor(drafts), ends, slots]
    given[3] = torch.cat((ends, ends[-1:], ends[-1:]))
    expected, lines, gains = table.clone(), recent.clone(), torch.full((len(ends) + 3,), POISON)
    length, last, drawn = expected
    for row, end in enumerate(ends.tolist()):
        first = end - 1 - counts[row]
        stays = [tokens[place] == drafts[place] and not faults[place] for place in range(first, end)]
        gained = stays.index(False) + 1
        slot = int(slots[first])
        length[slot] -= end - first - gained
        last[slot], drawn[slot] = tokens[first + gained - 1], drawn[slot] + gained
        lines[slot] = torch.tensor((lines[slot].tolist() + tokens[first : first + gained])[-width:])
        gains[row] = gained
    for op in (verify_drafts, reference.verify_drafts):
        moved, ours = table.to(device, copy=True), recent.to(device, copy=True)
        gained_by = torch.full_like(gains, POISON, device=device)
        op(*(column.to(device) for column in given), *moved, ours, gained_by[:-1])
        assert torch.equal(moved.cpu(), expected)
        assert torch.equal(ours.cpu(), lines)
        assert torch.equal(gained_by.cpu(), gains)


def test_look_up_tokens(device: str) -> None:
    known, slots = torch.randint(0, 1_000, (5, 4)), torch.tensor([3, 3, 0, 4, 1, 2])
    ids = torch.tensor([-2, -5, 7, -1, -3, 0])
    for op in (look_up_tokens, reference.look_up_tokens):
        out = torch.full((7,), POISON, device=device)
        op(ids.to(device), slots.to(device), known.to(device), out[:-1])
        assert out.tolist() == [int(known[3, 0]), int(known[3, 3]), POISON, POISON, int(known[1, 1]), POISON, POISON]
        same = ids.to(device, copy=True)
        op(same, slots.to(device), known.to(device), same)
        assert same.tolist() == [int(known[3, 0]), int(known[3, 3]), 7, -1, int(known[1, 1]), 0]


def test_follow_slots(device: str) -> None:
    """Rows of 2, 1, 3 and 2 tokens, of which the second one's is the slot's last and the last one's are given."""
    slots, row_of_token = torch.tensor([2, 0, 3, 1]), torch.tensor([0, 0, 1, 2, 2, 2, 3, 3])
    offsets, ids = torch.tensor([0, 1, 0, 0, 1, 2, 0, 1]), torch.tensor([-4, -5, -1, -3, -4, -5, 8, 9])
    followed = torch.randint(50, 1_000, (2, 5))
    for op in (follow_slots, reference.follow_slots):
        own = torch.full((2, 5), POISON, device=device)
        op(*(column.to(device) for column in (slots, row_of_token, offsets, ids, *followed)), 3, *own)
        length, drawn = followed.tolist()
        assert own.tolist() == [
            [POISON, POISON, length[2] - 1, length[3] - 2, POISON],
            [POISON, POISON, drawn[2], drawn[3], POISON],
        ]


def test_note_drafts(device: str) -> None:
    """The first, the second, one more than there is room for, and none yet."""
    slots, last = torch.tensor([3, 0, 2, 1]), torch.tensor([10, 11, 12, 13, 14])
    drawn, before = torch.tensor([7, 5, 9, 6, 0]), torch.tensor([5, 5, 6, 5, 0])
    for op in (note_drafts, reference.note_drafts):
        drafts = torch.full((5, 2), POISON, device=device)
        op(*(column.to(device) for column in (slots, last, drawn, before)), drafts)
        assert drafts.tolist() == [[POISON, 10], [POISON] * 2, [POISON] * 2, [13, POISON], [POISON] * 2]
