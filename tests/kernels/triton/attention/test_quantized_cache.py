"""Attention over a cache of 8-bit elements with a scale for each head, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import paged_attention as reference
from quire.compute.kernels.reference import rowwise_attention
from quire.compute.kernels.reference.attention_inputs import (
    CacheWrite,
    GatherChunks,
    KVSplits,
    Mask,
    PagedKV,
    PagedRows,
    QKNormRope,
    QueryTiles,
    Scores,
)
from quire.compute.kernels.reference.quantized_rows import LARGEST
from quire.compute.kernels.triton.attention import decode_split_kv, prefill, prefill_split_kv
from quire.compute.kernels.triton.attention.gather_kv import gather_kv
from quire.compute.kernels.triton.attention.qk_norm_rope import qk_norm_rope_and_cache
from tests.kernels.triton.attention.paged import NAN, assert_near

CACHES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.gpu)]
HEADS, KV_HEADS, D, BLOCK_SIZE = 6, 2, 64, 16

pytestmark = pytest.mark.parametrize("cache", CACHES, ids=str)


def stored(cache: torch.dtype, blocks: int, device: str) -> tuple[Tensor, Tensor]:
    """Keys and values that fill what the type can hold."""
    most = 127.0 if cache == torch.int8 else torch.finfo(cache).max
    kv = torch.randn(2, blocks, BLOCK_SIZE, KV_HEADS, D) * (most / 4)
    keys, values = rowwise_attention.quantized(kv, cache).to(device)
    return keys, values


def scales_of(cache: torch.dtype, device: str) -> Tensor:
    """Under which keys and values are about as large as queries."""
    most = 127.0 if cache == torch.int8 else torch.finfo(cache).max
    return (torch.tensor([[1.0, 0.7], [1.3, 0.9]]) * (4 / most)).to(device)


def queries(tokens: int, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplied with their keys' scales."""
    of_heads = scales[0].cpu().repeat_interleave(HEADS // KV_HEADS)[:, None]
    return (torch.randn(tokens, HEADS, D) * of_heads).to(dtype).to(scales.device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(cache: torch.dtype, dtype: torch.dtype, device: str) -> None:
    lengths = [1, 70, 200, 33]
    keys, values = stored(cache, 60, device)
    scales = scales_of(cache, device)
    table = torch.arange(60, device=device).view(4, 15)
    q = queries(4, scales, dtype)
    starts, slots = torch.tensor(lengths, device=device) - 1, torch.arange(4, device=device)
    splits = torch.zeros((10, 8), dtype=torch.int32, device=device)
    tile = decode_split_kv.keys_of_tile(D, q.element_size())
    rows = PagedRows(table, slots, starts, torch.ones_like(slots))
    decode_split_kv.plan_kv_splits(rows, None, Mask(), splits, tile, 6)
    partials = reference.new_decode_partials(len(splits), HEADS, KV_HEADS, D, torch.device(device))
    found, expected = (torch.full_like(q, NAN) for _ in range(2))
    rest = (PagedKV(keys, values, scales), table, splits, partials, Scores(D**-0.5))
    decode_split_kv.decode_attention(q, *rest, found)
    reference.decode_attention(q, *rest, expected)
    assert_near(found, expected)


@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill(cache: torch.dtype, dtype: torch.dtype, parts: int | None, device: str) -> None:
    """With keys in one part, and in three."""
    before, n = 150, 9
    keys, values = stored(cache, 10, device)
    scales = scales_of(cache, device)
    q = queries(n, scales, dtype)
    of_tile = prefill.queries_of_tile(D, q.element_size(), HEADS // KV_HEADS, q.device)
    tiles = [(0, at, number) for at in range(0, n, of_tile) for number in range(parts or 1)]
    tile_rows, offsets, numbers = torch.tensor(tiles, device=device).T.contiguous()
    column = torch.tensor([0], device=device)
    rows = PagedRows(torch.arange(10, device=device)[None], column, column + before, column + n)
    kv, own = PagedKV(keys, values, scales), QueryTiles(tile_rows, offsets, column)
    found, expected = (torch.full_like(q, NAN) for _ in range(2))
    if parts is None:
        prefill.prefill_attention(q, kv, rows, own, of_tile, Mask(), Scores(0.1), found)
        reference.prefill_attention(q, kv, rows, own, of_tile, Mask(), Scores(0.1), expected)
    else:
        partials = reference.new_prefill_partials(len(tiles) * of_tile, HEADS, D, torch.device(device))
        cut = KVSplits(numbers, torch.full_like(numbers, parts))
        rest = (rows, own, cut, of_tile, partials, Mask(), Scores(0.1))
        prefill_split_kv.prefill_attention_split_kv(q, kv, *rest, found)
        reference.prefill_attention_split_kv(q, kv, *rest, expected)
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_contexts(cache: torch.dtype, dtype: torch.dtype, device: str) -> None:
    keys, values = stored(cache, 5, device)
    scales, zero = scales_of(cache, device), torch.tensor([0], device=device)
    table, chunks = torch.arange(5, device=device)[None], GatherChunks(zero, zero, zero + 70)
    rest = (PagedKV(keys, values, scales), table, zero, chunks)
    found, expected = (torch.full((2, 128, KV_HEADS, D), NAN, dtype=dtype, device=device) for _ in range(2))
    gather_kv(*rest, *found)
    reference.gather_kv(*rest, *expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_storing(cache: torch.dtype, dtype: torch.dtype, rotated: bool, device: str) -> None:
    """What is too large for the type too. A rotation may round elsewhere, where large numbers cancel by very much."""
    if cache == torch.float8_e5m2 and device == "cpu":
        pytest.skip("Triton's interpreter loses a carry when it rounds to e5m2")
    tokens = 7
    scales = scales_of(cache, device)
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, D)
    qkv[0, HEADS:] *= 1e4
    qkv = qkv.to(dtype).to(device)
    angle = 3 * torch.randn(tokens, D // 2)
    cos, sin = (angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)) if rotated else (None, None)
    places = torch.randperm(3 * BLOCK_SIZE)[:tokens].to(device)
    caches = [
        torch.zeros(2, 3, BLOCK_SIZE, KV_HEADS, D, dtype=torch.uint8, device=device).view(cache) for _ in range(2)
    ]
    found, expected = (torch.empty(tokens, HEADS, D, dtype=dtype, device=device) for _ in range(2))
    norm_rope = QKNormRope(cos=cos, sin=sin)
    own_write, other_write = (CacheWrite(PagedKV(*each, scales), places) for each in caches)
    qk_norm_rope_and_cache(qkv, norm_rope, own_write, found)
    rowwise_attention.qk_norm_rope_and_cache(qkv, norm_rope, other_write, expected)
    assert_near(found, expected)
    own, other = (each.float() for each in caches)
    assert (own == other).float().mean() > 0.99
    assert rotated or torch.allclose(own, other, rtol=0.26, atol=1.0)
    modest = [each.flatten(1, 2)[:, places[1:]] for each in (own, other)]
    torch.testing.assert_close(*modest, rtol=0.26, atol=LARGEST[cache] / 100)
