"""Contexts in contiguous memory, and the attention of long prompts over them, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.compute.attention.metadata_builder import PrefillTiling, RowKinds, dense_prefill
from quire.compute.kernels.reference import paged_attention as reference
from quire.compute.kernels.reference.attention_inputs import DenseTiles, GatherChunks, Scores
from quire.compute.kernels.triton.attention.gather_kv import gather_kv
from tests.kernels.triton.attention.paged import NAN, assert_near, paged, sinks_of

DTYPES = [torch.float32, torch.bfloat16]
GATHER_CHUNK = 128


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("kv_heads", "d"), [(1, 16), (3, 48), (8, 128)])
def test_gathered_contexts(kv_heads: int, d: int, block_size: int, dtype: torch.dtype, device: str) -> None:
    """Exactly what is in the cache, and zeros in between."""
    lengths = [1, 128, 130] if kv_heads < 8 else [70]
    cache = paged(lengths, block_size, kv_heads, d, dtype, device)
    slots = torch.arange(len(lengths), device=device).flip(0).contiguous()
    counts = np.array(lengths[::-1])  # by row: the last slot's comes first
    kinds = RowKinds(counts[:0], counts[:0], np.arange(len(lengths)))
    chunks = dense_prefill(counts, 0 * counts, kinds, PrefillTiling(1, gather_chunk=GATHER_CHUNK)).chunks
    rest = (*cache, slots, GatherChunks(*(column.to(device) for column in chunks)))
    found, expected = (
        torch.full((2, GATHER_CHUNK * len(chunks.rows), kv_heads, d), NAN, dtype=dtype, device=device) for _ in range(2)
    )
    gather_kv(*rest, *found)
    reference.gather_kv(*rest, *expected)
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 64), (3, 1, 128), (2, 2, 256)])
@pytest.mark.parametrize(
    "rows", [[(1, 0)], [(3, 0), (17, 5)], [(127, 0), (128, 127), (129, 128)], [(300, 1000), (1, 640), (700, 0)]]
)
def test_rows_of_many_tokens(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, d: int, cap: float | None, dtype: torch.dtype
) -> None:
    """Rows as (tokens, tokens before them)."""
    check(rows, heads, kv_heads, d, dtype, cap)


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(64, 8, 64), (8, 2, 128)])
def test_softmaxes_start_with_sinks(heads: int, kv_heads: int, d: int, cap: float | None) -> None:
    for rows in ([(3, 0), (17, 5)], [(300, 1000), (1, 640), (700, 0)], [(4096, 0)]):
        check(rows, heads, kv_heads, d, torch.bfloat16, cap, sinks=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[(8192, 0)], [(2000, 30_000)], [(512, 0)] * 16, [(1000, 3), (333, 4000)]])
def test_rows_of_many_tokens_of_real_sizes(rows: list[tuple[int, int]]) -> None:
    for _ in range(5):  # barriers that go wrong do so now and then
        check(rows, 32, 8, 128, torch.bfloat16, None)


def check(
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    d: int,
    dtype: torch.dtype,
    cap: float | None,
    sinks: bool = False,
) -> None:
    from quire.compute.kernels.triton.attention.prefill_dense import QUERIES, prefill_attention_dense

    counts, befores = (np.array(column) for column in zip(*rows, strict=True))
    tiling = PrefillTiling(1, dense_tile_queries=QUERIES, dense_min_queries=1, gather_chunk=GATHER_CHUNK)
    kinds = RowKinds(counts[:0], counts[:0], np.arange(len(rows)))
    metadata = dense_prefill(counts, befores, kinds, tiling)
    tiles = DenseTiles(*(column.cuda() for column in metadata.tiles))
    tiles.tokens.add_(1)  # the first token is nobody's
    chunks = len(metadata.chunks.rows)
    q = torch.randn((int(counts.sum()) + 2, heads, d), device="cuda", dtype=dtype)
    k, v = torch.zeros((2, chunks * GATHER_CHUNK, kv_heads, d), device="cuda", dtype=dtype)
    base = 0
    for n, before in rows:
        k[base : base + n + before].normal_()
        v[base : base + n + before].normal_()
        base += -(-(n + before) // GATHER_CHUNK) * GATHER_CHUNK
    q[0] = q[-1] = NAN
    found, expected = (torch.full_like(q, NAN) for _ in range(2))
    scores = Scores(d**-0.5, cap, sinks_of(heads, "cuda") if sinks else None)
    prefill_attention_dense(q, k, v, tiles, scores, found)
    reference.prefill_attention_dense(q, k, v, tiles, scores, expected)
    assert found[0].isnan().all()
    assert found[-1].isnan().all()
    assert_near(found[1:-1], expected[1:-1])
