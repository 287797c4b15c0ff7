"""Attention of several tokens of a row against the reference, on caches where what is not seen is NaN."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.reference import paged_attention as reference
from quire.compute.kernels.reference.attention_inputs import Mask, PagedRows, QueryTiles, Scores
from quire.compute.kernels.triton.attention.prefill import prefill_attention, queries_of_tile
from tests.kernels.triton.attention.paged import NAN, assert_near, paged, sinks_of, slopes_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(
    rows: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    d: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    window: int | None = None,
    chunk: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
    slopes: bool = False,
    two_sided: bool = False,
) -> None:
    """Rows as (tokens before the step, tokens in it). One token before and after them belongs to nobody."""
    begins = None if chunk is None else [start // chunk * chunk for start, _ in rows]
    farthest = None if window is None else window + max(n for _, n in rows) - 1  # what the row's first query sees
    cache = paged([start + n for start, n in rows], block_size, kv_heads, d, dtype, device, farthest, begins)
    counts = torch.tensor([n for _, n in rows])
    firsts = 1 + counts.cumsum(0) - counts
    q = torch.randn(int(counts.sum()) + 2, heads, d).to(dtype).to(device)
    q[0] = q[-1] = NAN
    queries = queries_of_tile(d, q.element_size(), heads // kv_heads, q.device)
    tiles = [(row, at) for row, (_, n) in enumerate(rows) for at in range(0, n, queries)]
    tile_rows, tile_offsets = torch.tensor(tiles, device=device).T.contiguous()
    starts = torch.tensor([start for start, _ in rows], device=device)
    slots = torch.arange(len(rows), device=device)
    found, expected = (torch.full_like(q, NAN) for _ in range(2))
    step = PagedRows(cache.table, slots, starts, counts.to(device))
    more = sinks_of(heads, device) if sinks else None, slopes_of(heads, device) if slopes else None
    scores, mask = Scores(d**-0.5, cap, *more), Mask(window, chunk, two_sided)
    rest = (step, QueryTiles(tile_rows, tile_offsets, firsts.to(device)), queries, mask, scores)
    prefill_attention(q, cache.kv, *rest, found)
    reference.prefill_attention(q, cache.kv, *rest, expected)
    assert found[0].isnan().all()
    assert found[-1].isnan().all()
    assert_near(found[1:-1], expected[1:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [48, 64, 80, 128, 256])
def test_widths_of_heads(d: int, dtype: torch.dtype, device: str) -> None:
    check([(30, 20), (0, 3)], heads=4, kv_heads=2, d=d, device=device, dtype=dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (8, 2), (7, 1), (16, 1)])
def test_sizes_of_groups(heads: int, kv_heads: int, device: str) -> None:
    check([(9, 41), (0, 130)], heads=heads, kv_heads=kv_heads, d=16, device=device)


@pytest.mark.parametrize(
    "rows", [[(0, 2)], [(63, 1), (64, 2), (65, 127)], [(0, 129)], [(500, 17)], [(17, 300), (0, 64)]]
)
def test_lengths(rows: list[tuple[int, int]], device: str) -> None:
    check(rows, heads=2, kv_heads=1, d=16, device=device)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("window", [1, 7, 64, 100])
def test_block_sizes_and_windows(block_size: int, window: int, device: str) -> None:
    check([(150, 40), (0, 90), (3, 2)], heads=4, kv_heads=1, d=16, device=device, block_size=block_size, window=window)


@pytest.mark.parametrize("window", [None, 20])
def test_scores_are_bounded(window: int | None, device: str) -> None:
    check([(70, 20), (0, 5)], heads=4, kv_heads=2, d=16, device=device, window=window, cap=0.5)


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (20, None), (None, 24)])
def test_softmaxes_start_with_sinks(window: int | None, chunk: int | None, cap: float | None, device: str) -> None:
    rows = [(70, 20), (0, 5), (300, 2)]
    check(rows, heads=6, kv_heads=2, d=16, device=device, window=window, chunk=chunk, cap=cap, sinks=True)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3)])
def test_scores_fall_with_the_distance(heads: int, kv_heads: int, window: int | None, device: str) -> None:
    rows = [(70, 20), (0, 5), (300, 2)]
    check(rows, heads=heads, kv_heads=kv_heads, d=16, device=device, window=window, slopes=True)


@pytest.mark.parametrize("chunk", [1, 8, 50, 64, 1000])
def test_chunks(chunk: int, device: str) -> None:
    """Of a tile's queries, some are of another chunk and see nothing of the first keys."""
    check([(150, 40), (0, 90), (63, 2), (64, 1)], heads=4, kv_heads=1, d=16, device=device, chunk=chunk)


@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("sinks", [False, True])
def test_whole_rows_see_both_sides(window: int | None, sinks: bool, device: str) -> None:
    """The keys of a tile's first queries end before those of its last."""
    rows = [(0, 130), (0, 5), (0, 65)]
    check(rows, heads=6, kv_heads=2, d=16, device=device, window=window, sinks=sinks, two_sided=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[(0, 8192)], [(30_000, 2000)], [(0, 512)] * 16, [(5000, 3), (0, 1500), (129, 2049)]])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 8, 128), (14, 2, 64), (8, 4, 256), (32, 32, 80)])
@pytest.mark.parametrize("window", [None, 1024])
def test_real_sizes(rows: list[tuple[int, int]], heads: int, kv_heads: int, d: int, window: int | None) -> None:
    check(rows, heads=heads, kv_heads=kv_heads, d=d, device="cuda", window=window)
