"""Verification's ops in Triton against the reference: equal to the last bit, and nothing else is touched."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from quire.kernels.reference import drafts as reference
from quire.kernels.reference.sample import SamplingColumns
from quire.kernels.triton.drafts import keep_drafts, position_columns

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
def test_keep_drafts(counts: list[int], device: str) -> None:
    """By the definition, row by row; a fault ends a row, and what is no row's stays."""
    rng = random.Random(len(counts))
    slots, _, ends = positions(counts)
    tokens, drafts, faults = [rng.randrange(5) for _ in slots], [], [int(rng.random() < 0.05) for _ in slots]
    for place, token in enumerate(tokens):
        drafts.append(-1 if place + 1 in ends.tolist() else token if rng.random() < 0.7 else token + 1)
    table = torch.randint(100, 2**33, (3, len(counts) + 3))
    given = [torch.tensor(tokens), torch.tensor(faults, dtype=torch.int8), torch.tensor(drafts), ends, slots]
    expected = table.clone()
    length, last, drawn = expected
    for row, end in enumerate(ends.tolist()):
        first = end - 1 - counts[row]
        stays = [tokens[place] == drafts[place] and not faults[place] for place in range(first, end)]
        gained = stays.index(False) + 1
        slot = int(slots[first])
        length[slot] -= end - first - gained
        last[slot], drawn[slot] = tokens[first + gained - 1], drawn[slot] + gained
    for op in (keep_drafts, reference.keep_drafts):
        moved = table.to(device, copy=True)
        op(*(column.to(device) for column in given), max(counts), *moved)
        assert torch.equal(moved.cpu(), expected)
