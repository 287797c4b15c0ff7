"""Verification's ops on a CPU equal their references to the last bit."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.cpu import drafts
from quire.compute.kernels.reference import drafts as reference
from quire.compute.kernels.reference.sample import SamplingColumns

pytestmark = pytest.mark.usefixtures("instructions")
SLOTS = 12


def test_position_columns() -> None:
    generator = torch.Generator().manual_seed(1)
    slots, offsets = torch.tensor([4, 4, 4, 0, 11, 11]), torch.tensor([0, 1, 2, 0, 0, 1])

    def columns(n: int) -> SamplingColumns:
        ints, floats = (
            torch.randint(-(2**62), 2**62, (3, n), generator=generator),
            torch.rand(3, n, generator=generator),
        )
        return SamplingColumns(floats[0], ints[0], floats[1], floats[2], ints[1], ints[2])

    asked = columns(SLOTS)
    found, expected = columns(6), columns(6)
    drafts.position_columns(slots, offsets, asked, found)
    reference.position_columns(slots, offsets, asked, expected)
    assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("width", [6, 9])
@pytest.mark.parametrize("seed", range(20))
def test_verify_drafts(seed: int, width: int) -> None:
    """Rows of 1 to 6 positions, of which some have faults; the last two rows are padding."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (8,), generator=generator)
    ends, positions = sizes.cumsum(0), int(sizes.sum())
    tokens = torch.randint(0, 50, (positions,), generator=generator)
    right = torch.rand(positions, generator=generator) < 0.7
    next_drafts = torch.where(right, tokens, tokens + 1)
    next_drafts[ends - 1] = -1
    faults = (torch.rand(positions, generator=generator) < 0.05).to(torch.int8)
    slots = torch.randperm(SLOTS, generator=generator)[:8].repeat_interleave(sizes)
    padded = torch.cat((ends, ends[-1:], ends[-1:]))
    results = []
    for verify in (drafts.verify_drafts, reference.verify_drafts):
        table, counts = torch.arange(3 * SLOTS).view(3, SLOTS) * 1_000, torch.full((10,), -9)
        recent = -torch.arange(SLOTS * width).view(SLOTS, width)
        verify(tokens, faults, next_drafts, padded, slots, *table, recent, counts)
        results.append((table, recent, counts))
    assert all(torch.equal(own, other) for own, other in zip(*results, strict=True))
    assert results[0][2][:8].max() > 1
    assert results[0][2][8:].tolist() == [-9, -9]
