"""Lengths and frequencies of ropes by length equal their references; tests/models compares these with transformers."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.cpu.embedding import (
    choose_frequencies,
    grow_frequencies,
    sequence_lengths,
    shifted_positions,
)
from quire.compute.kernels.reference import rotary as reference

pytestmark = pytest.mark.usefixtures("instructions")
LENGTHS = torch.tensor([1, 80, 80, 81, 200, 200, 3, 1_000])


def test_sequence_lengths() -> None:
    least, slots = torch.tensor([5, 0, 90]), torch.tensor([0, 0, 1, 2])
    positions, found = torch.tensor([3, 7, 0, 2]), torch.empty(4, dtype=torch.int64)
    sequence_lengths(least, slots, positions, found)
    assert found.tolist() == [5, 8, 1, 90]


@pytest.mark.parametrize("half", [1, 6, 33])
def test_choose_frequencies(half: int) -> None:
    both = torch.rand(2, half)
    found, expected = torch.empty(len(LENGTHS), half), torch.empty(len(LENGTHS), half)
    choose_frequencies(LENGTHS, both, 80, found)
    reference.choose_frequencies(LENGTHS, both, 80, expected)
    assert torch.equal(found, expected)
    assert torch.equal(found[1], both[0])
    assert torch.equal(found[3], both[1])


@pytest.mark.parametrize("half", [2, 6, 33])
def test_grow_frequencies(half: int) -> None:
    found, expected = torch.empty(len(LENGTHS), half), torch.empty(len(LENGTHS), half)
    grow_frequencies(LENGTHS, 1e4, 3.0, 80, found)
    reference.grow_frequencies(LENGTHS, 1e4, 3.0, 80, expected)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[3])


def test_shifted_positions() -> None:
    shifts, slots = torch.tensor([-5, 0, 2]), torch.tensor([0, 0, 1, 2])
    positions, found = torch.tensor([9, 10, 0, 2]), torch.empty(4, dtype=torch.int64)
    shifted_positions(shifts, slots, positions, found)
    assert found.tolist() == [4, 5, 0, 4]
