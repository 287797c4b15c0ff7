"""Attention of a few tokens over contexts that are cut, on caches where what is not seen is NaN."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.reference import paged_attention as reference
from quire.compute.kernels.reference.attention_inputs import KVSplits, Mask, PagedRows, QueryTiles, Scores
from quire.compute.kernels.triton.attention import prefill_split_kv as ours
from quire.compute.kernels.triton.attention.prefill import queries_of_tile
from tests.kernels.triton.attention.paged import NAN, assert_near, paged, sinks_of, slopes_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(
    rows: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    d: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    chunk: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
    slopes: bool = False,
    parts: int = 3,
    padding: int = 0,
    two_sided: bool = False,
) -> None:
    """Rows as (tokens before the step, tokens in it). One token before and after them belongs to nobody; nor do tiles
    of a row without tokens that stand behind the others, in one part or none.
    """
    begins = None if chunk is None else [start // chunk * chunk for start, _ in rows]
    farthest = None if window is None else window + max(n for _, n in rows) - 1  # what the row's first query sees
    cache = paged([start + n for start, n in rows], 16, kv_heads, d, dtype, device, farthest, begins)
    counts = torch.tensor([n for _, n in rows])
    firsts = 1 + counts.cumsum(0) - counts
    q = torch.randn(int(counts.sum()) + 2, heads, d).to(dtype).to(device)
    q[0] = q[-1] = NAN
    queries = queries_of_tile(d, q.element_size(), heads // kv_heads, q.device)
    tiles = [(row, at) for row, (_, n) in enumerate(rows) for at in range(0, n, queries)]
    cut = [(*tile, number, parts) for tile in tiles for number in range(parts)]
    of_part = torch.tensor(cut + [(len(rows) - 1, 0, 0, n % 2) for n in range(padding)], device=device).T.contiguous()
    partials = reference.new_prefill_partials(len(cut) * queries, heads, d, torch.device(device))
    partials.outputs.fill_(NAN)
    partials.sums.fill_(NAN)
    starts = torch.tensor([start for start, _ in rows], device=device)
    slots = torch.arange(len(rows), device=device)
    found, expected = (torch.full_like(q, NAN) for _ in range(2))
    tile_rows, tile_offsets, numbers, of_tile = of_part
    step = PagedRows(cache.table, slots, starts, counts.to(device))
    own, splits = QueryTiles(tile_rows, tile_offsets, firsts.to(device)), KVSplits(numbers, of_tile)
    more = sinks_of(heads, device) if sinks else None, slopes_of(heads, device) if slopes else None
    scores = Scores(d**-0.5, cap, *more)
    rest = (step, own, splits, queries, partials, Mask(window, chunk, two_sided), scores)
    ours.prefill_attention_split_kv(q, cache.kv, *rest, found)
    reference.prefill_attention_split_kv(q, cache.kv, *rest, expected)
    assert found[0].isnan().all()
    assert found[-1].isnan().all()
    assert_near(found[1:-1], expected[1:-1])


@pytest.mark.parametrize("parts", [1, 2, 9])
@pytest.mark.parametrize("window", [None, 1, 140, 600])
@pytest.mark.parametrize("before", [127, pytest.param(383, marks=pytest.mark.long("engine"))])
def test_contexts_and_windows(before: int, window: int | None, parts: int, device: str) -> None:
    """Some parts are empty, some are all that there is, and some see nothing of what others do."""
    rows = [(before, 7), (0, 5), (before - 1, 1)]
    check(rows, heads=3, kv_heads=1, d=16, device=device, window=window, parts=parts)


@pytest.mark.parametrize("parts", [13, 32])
def test_more_parts_than_are_in_work_at_once(parts: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "MIN_SPLIT_TILES", 1)
    check([(600, 3)], heads=3, kv_heads=1, d=16, device=device, parts=parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(7, 1, 48), (4, 2, 128), (2, 1, 256)])
def test_wide_heads(heads: int, kv_heads: int, d: int, dtype: torch.dtype, device: str) -> None:
    """Of products of 64 rows, programs merge several times as many as they have in work."""
    check([(400, 9)], heads=heads, kv_heads=kv_heads, d=d, device=device, dtype=dtype, cap=0.5)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [None, 140])
def test_scores_fall_with_the_distance(window: int | None, parts: int, device: str) -> None:
    rows = [(300, 7), (0, 5)]
    check(rows, heads=6, kv_heads=2, d=16, device=device, window=window, parts=parts, slopes=True)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (140, None), (None, 96)])
def test_sinks_count_once(window: int | None, chunk: int | None, parts: int, device: str) -> None:
    rows = [(300, 7), (0, 5)]
    check(rows, heads=6, kv_heads=2, d=16, device=device, window=window, chunk=chunk, parts=parts, sinks=True)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("window", [None, 30])
def test_whole_rows_see_both_sides(
    window: int | None, parts: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of three tiles of keys is cut into as many parts, and one of four is empty."""
    monkeypatch.setattr(ours, "MIN_SPLIT_TILES", 1)
    rows = [(0, 70), (0, 5), (0, 1)]
    check(rows, heads=2, kv_heads=1, d=16, device=device, window=window, parts=parts, two_sided=True)


def test_whole_tiles(device: str) -> None:
    check([(600, 64)], heads=2, kv_heads=2, d=16, device=device, dtype=torch.bfloat16, parts=2)


@pytest.mark.parametrize("parts", [1, 3])
def test_tiles_of_rows_without_tokens_are_padding(parts: int, device: str) -> None:
    check([(300, 9), (0, 0)], heads=2, kv_heads=1, d=16, device=device, parts=parts, padding=3)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (128, None), (None, 1024)])
@pytest.mark.parametrize("parts", [2, 32])
def test_sinks_of_real_sizes(window: int | None, chunk: int | None, parts: int) -> None:
    rows, dtype = [(9_000, 3), (0, 40), (129, 30)], torch.bfloat16
    more = {"window": window, "chunk": chunk, "parts": parts, "sinks": True}
    check(rows, heads=64, kv_heads=8, d=64, device="cuda", dtype=dtype, **more)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[(2_000, 50)], [(20_000, 16)], [(2_000, 20)] * 4, [(9_000, 3), (0, 40), (129, 30)]])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 8, 128), (14, 2, 64), (8, 4, 256), (32, 32, 80)])
@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("parts", [2, 32])
def test_real_sizes(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, d: int, window: int | None, parts: int
) -> None:
    dtype = torch.bfloat16
    check(rows, heads=heads, kv_heads=kv_heads, d=d, device="cuda", dtype=dtype, window=window, parts=parts)
