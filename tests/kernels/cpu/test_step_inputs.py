"""What a step begins with equals its references."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.cpu import embedding
from quire.compute.kernels.cpu import rowwise_attention as cpu_paged_attention
from quire.compute.kernels.reference import embedding as reference_embedding
from quire.compute.kernels.reference import paged_attention
from quire.compute.kernels.reference import step_inputs as reference

pytestmark = pytest.mark.usefixtures("instructions")


def test_prepare_inputs() -> None:
    """Named tokens and those sampled last; the dummy, slot 5, stands in two rows and keeps no length."""
    slots, counts = torch.tensor([3, 0, 5, 5]), torch.tensor([3, 1, 2, 0])
    rows, offsets = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 1, 2, 0, 0, 1])
    ids = torch.tensor([11, 12, 13, -1, 0, 0])
    results = []
    for prepare in (embedding.prepare_inputs, reference.prepare_inputs):
        length, last = torch.tensor([7, 1, 2, 40, 5, 0]), torch.tensor([100, 101, 102, 103, 104, 105])
        found = [torch.full((n,), -9) for n in (4, 6, 6, 6)]
        prepare(slots, counts, rows, offsets, ids, length, last, 5, *found)
        results.append([length, *found])
    assert all(torch.equal(own, other) for own, other in zip(*results, strict=True))
    assert results[0][0].tolist() == [8, 1, 2, 43, 5, 0]


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_slot_mapping(block_size: int) -> None:
    table = torch.randperm(200).view(5, 40)
    slots, positions = torch.tensor([4, 0, 0, 2]), torch.tensor([0, 33, 34, 39])
    found, expected = torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int64)
    cpu_paged_attention.compute_slot_mapping(table, slots, positions, block_size, found)
    paged_attention.compute_slot_mapping(table, slots, positions, block_size, expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 900])
@pytest.mark.parametrize("own", [False, True])
def test_angles(dtype: torch.dtype, tokens: int, own: bool) -> None:
    """At positions where fp32 has to be reduced with care; with frequencies of each token's own or of all."""
    positions = torch.randint(0, 120_000, (tokens,), generator=torch.Generator().manual_seed(0))
    frequencies = 10_000 ** -(torch.arange(19) / 19)
    if own:
        frequencies = frequencies * torch.linspace(0.5, 1, max(1, tokens)).unsqueeze(1)[:tokens]
    found, expected = ([torch.empty(tokens, 19, dtype=dtype) for _ in range(2)] for _ in range(2))
    embedding.angles(positions, frequencies.contiguous(), 1.25, *found)
    reference_embedding.angles(positions, frequencies, 1.25, *expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (300, 33), (7, 5000)])
def test_take_rows(shape: tuple[int, int]) -> None:
    x, rows = torch.randn(shape).to(torch.bfloat16), torch.randint(0, shape[0], (100,))
    out = torch.empty(100, shape[1], dtype=x.dtype)
    embedding.take_rows(x, rows, out)
    assert torch.equal(out, x[rows])


def test_local_indices() -> None:
    tokens, found, expected = torch.tensor([0, 4, 5, 9, 10, 3]), *torch.empty((2, 6), dtype=torch.int64)
    embedding.local_indices(tokens, 4, 6, found)
    reference_embedding.local_indices(tokens, 4, 6, expected)
    assert found.tolist() == expected.tolist() == [6, 0, 1, 5, 6, 6]
