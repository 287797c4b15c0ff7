"""Penalties and counts on the device against the reference."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.reference import penalties as reference
from quire.compute.kernels.triton.sampling.logits_transforms import apply_penalties, count_sampled


def state(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts, most of them 0, and weights of both signs."""
    counts = torch.randint(1, 9, (rows, vocab), dtype=torch.int32) * (torch.rand(rows, vocab) < 0.2)
    return counts.to(torch.int32), torch.rand(rows, 3) * 3 - torch.tensor([1.5, 1.5, -0.2])


@pytest.mark.parametrize(("reads", "vocab"), [(1, 1), (3, 17), (5, 127), (2, 5_000)])
def test_asking_reads_are_changed_as_by_the_reference(reads: int, vocab: int, device: str) -> None:
    torch.manual_seed(vocab)
    seen, weights = state(reads + 2, vocab)
    rows, asking = torch.randperm(reads + 2)[:reads], torch.randperm(reads + 1)[:reads]
    whole = torch.randn(reads + 1, vocab + 3) * 4
    whole[0, 0] = -torch.inf  # forbidden by another rule
    expected = whole.clone()
    reference.apply_penalties(expected[:, :vocab], asking, rows, seen, weights)
    found = whole.clone().to(device)
    apply_penalties(found[:, :vocab], asking.to(device), rows.to(device), seen.to(device), weights.to(device))
    assert torch.equal(found[:, vocab:].cpu(), whole[:, vocab:])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
    others = [read for read in range(reads + 1) if read not in asking]
    assert torch.equal(found[others].cpu(), whole[others])


@pytest.mark.parametrize("reads", [1, 3, 129])
def test_drawn_tokens_are_counted_once(reads: int, device: str) -> None:
    torch.manual_seed(reads)
    seen, _ = state(reads + 4, 50)
    rows, asking = torch.randperm(reads + 4)[:reads], torch.randperm(reads + 7)[:reads]
    tokens = torch.randint(0, 50, (reads + 7,))
    expected, found = seen.clone(), seen.clone().to(device)
    reference.count_sampled(tokens, asking, rows, expected)
    count_sampled(tokens.to(device), asking.to(device), rows.to(device), found)
    assert torch.equal(found.cpu(), expected)
    assert (expected - seen).sum() == 2 * reads
