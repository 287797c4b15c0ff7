"""Attention over latents against the reference, on caches where what is not seen is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import latents as reference
from quire.compute.kernels.reference import paged_attention
from quire.compute.kernels.reference.attention_inputs import Mask, PagedRows, QueryTiles
from quire.compute.kernels.triton.attention import latent_products
from quire.compute.kernels.triton.attention import latents as ours
from tests.kernels.triton.attention.paged import assert_near, paged

ROTATED = 8
DTYPES = [torch.float32, torch.bfloat16]
SCALE = 0.17


def cache(lengths: list[int], block_size: int, rank: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    kv, table = paged(lengths, block_size, 1, ROTATED + rank, dtype, device)
    return kv.keys.squeeze(2).contiguous(), table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "rank", "block_size", "lengths", "room"),
    [(16, 32, 16, [1, 40, 200], 3), (5, 20, 8, [90, 33], 9), (20, 32, 16, [130, 7, 64], 24), (33, 16, 32, [70], 1)],
)
def test_decode(
    heads: int, rank: int, block_size: int, lengths: list[int], room: int, dtype: torch.dtype, device: str
) -> None:
    """Heads of several tiles, and splits of one, of some, and more than there are entries."""
    latents, table = cache(lengths, block_size, rank, dtype, device)
    rows = len(lengths)
    starts, slots = torch.tensor(lengths, device=device) - 1, torch.arange(rows, device=device)
    splits = torch.zeros((room, paged_attention.KV_SPLIT_COLUMNS), dtype=torch.int32, device=device)
    tile = ours.keys_of_tile(dtype.itemsize, torch.device(device))
    paged_attention.plan_kv_splits(PagedRows(slots, slots, starts, slots), None, Mask(), splits, tile, room)
    q = torch.randn(rows, heads, ROTATED + rank).to(dtype).to(device)
    tiles = ours.tiles_of_heads(heads)
    partials = paged_attention.new_decode_partials(room, tiles * ours.HEADS_OF_TILE, tiles, rank, torch.device(device))
    found, expected = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    for decode_latents, out in ((ours.decode_latents, found), (reference.decode_latents, expected)):
        decode_latents(q, latents, ROTATED, table, splits, partials, SCALE, out)
    assert_near(found, expected)
    assert not partials.arrived.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "rank", "before", "counts"),
    [(16, 32, [0, 37], [9, 21]), (5, 20, [64], [3]), (20, 16, [5, 0, 100], [2, 33, 1])],
)
def test_prefill(heads: int, rank: int, before: list[int], counts: list[int], dtype: torch.dtype, device: str) -> None:
    """Chunks of several rows behind what is cached, and a tile of padding."""
    lengths = [a + b for a, b in zip(before, counts, strict=True)]
    latents, table = cache(lengths, 16, rank, dtype, device)
    queries, rows = ours.queries_of_tile(dtype.itemsize, torch.device(device)), len(counts)
    found_tiles = [(row, offset) for row in range(rows) for offset in range(0, counts[row], queries)]
    tile_rows, offsets = (torch.tensor([*column, last], device=device)
                          for column, last in zip(zip(*found_tiles, strict=True), (rows, 0), strict=True))  # fmt: skip
    columns = [torch.tensor([*each, 0], device=device) for each in (range(rows), before, counts)]
    firsts = torch.tensor([*(sum(counts[:row]) for row in range(rows)), 0], device=device)
    paged_rows, tiles = PagedRows(table, *columns), QueryTiles(tile_rows, offsets, firsts)
    q = torch.randn(sum(counts), heads, ROTATED + rank).to(dtype).to(device)
    found, expected = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    ours.prefill_latents(q, latents, ROTATED, paged_rows, tiles, queries, SCALE, found)
    real = QueryTiles(tile_rows[:-1], offsets[:-1], firsts)
    reference.prefill_latents(q, latents, ROTATED, paged_rows, real, queries, SCALE, expected)
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "k", "n"), [(1, 3, 24, 40), (19, 2, 80, 30), (70, 2, 16, 20)])
def test_products_of_heads(
    tokens: int, heads: int, k: int, n: int, dtype: torch.dtype, device: str, *, turned: bool
) -> None:
    """Of parts of wider tensors, with weights in either order, by few tokens and many."""
    x = torch.randn(tokens, heads, k + 5).to(dtype).to(device)[..., 5:]
    weight = torch.randn(heads, n, k).transpose(1, 2) if turned else torch.randn(heads, k, n)
    weight = weight.to(dtype).to(device)
    found, expected = (torch.full((tokens, heads + 1, n + 3), 7.0, dtype=dtype, device=device) for _ in range(2))
    latent_products.head_products(x, weight, found[:, :heads, 3:])
    reference.head_products(x, weight, expected[:, :heads, 3:])
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "rank"), [(1, 1, 16), (7, 5, 20), (3, 16, 32)])
def test_inputs(tokens: int, heads: int, rank: int, dtype: torch.dtype, device: str) -> None:
    q = torch.randn(tokens, heads, 12 + ROTATED).to(dtype).to(device)
    latent = torch.randn(tokens, rank + ROTATED).to(dtype).to(device)
    weight = torch.rand(rank).to(dtype).to(device)
    found, expected = (torch.full((tokens, heads + 1, ROTATED + rank), 7.0).to(q) for _ in range(2))
    for latent_inputs, qk in ((latent_products.latent_inputs, found), (reference.latent_inputs, expected)):
        latent_inputs(q, latent, weight, 1e-5, qk)
    assert_near(found, expected)
