"""Moving blocks in Triton against the reference: equal to the last bit, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import host_transfer as reference
from quire.compute.kernels.triton.host_transfer import move_blocks

DTYPES = [torch.float32, torch.bfloat16]
PIECES = [(4, 2, 3), (8, 1, 63), (16, 2, 128)]
"""Block size, heads and their width."""


def storage(device: str, dtype: torch.dtype, storages: int, blocks: int, piece: tuple[int, ...]) -> Tensor:
    """[blocks, storages, …], as the cache lies in memory: storage by storage."""
    return torch.randn((storages, blocks, *piece), device=device).to(dtype).transpose(0, 1)


def numbers(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", PIECES)
def test_copies_within_the_cache(piece: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    ours = storage(device, dtype, 3, 9, piece)
    theirs = ours.transpose(0, 1).clone().transpose(0, 1)
    origins, goals = numbers(device, 0, 7, 7, 3), numbers(device, 8, 1, 5, 2)
    move_blocks(ours, origins, ours, goals)
    reference.move_blocks(theirs, origins, theirs, goals)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", PIECES)
def test_out_to_a_buffer_and_back_elsewhere(piece: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """NaN, which is what a broken request leaves, travels like any number."""
    cache = storage(device, dtype, 2, 7, piece)
    cache[4] = float("nan")
    before = cache.clone()
    origins, goals = numbers(device, 4, 0, 5), numbers(device, 1, 6, 0)
    staged, expected = (torch.full((5, *cache.shape[1:]), 9.0, dtype=dtype, device=device) for _ in range(2))
    move_blocks(cache, origins, staged, None)
    reference.move_blocks(before, origins, expected, None)
    torch.testing.assert_close(staged, expected, rtol=0, atol=0, equal_nan=True)
    assert (staged[3:] == 9).all()
    move_blocks(staged, None, cache, goals)
    reference.move_blocks(expected, None, before, goals)
    torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)


def test_no_blocks(device: str) -> None:
    cache = storage(device, torch.float32, 2, 3, (4,))
    move_blocks(cache, numbers(device), cache, numbers(device))


@pytest.mark.gpu
def test_caches_beyond_2_31_elements() -> None:
    """As large as one of Llama-3.1-8B with 2,100 blocks of 16 tokens."""
    cache = storage("cuda", torch.bfloat16, 64, 2_100, (16, 8, 128))
    assert cache.numel() > 2**31
    origins, goals = numbers("cuda", 2_099, 0, 500), numbers("cuda", 1, 1_000, 2_098)
    move_blocks(cache, origins, cache, goals)
    assert torch.equal(cache[goals], cache[origins])
