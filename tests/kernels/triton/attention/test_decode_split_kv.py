"""Attention of single tokens against the reference, on caches where what is not seen is NaN."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import paged_attention as reference
from quire.compute.kernels.reference.attention_inputs import DecodeRows, Mask, PagedRows, Scores
from quire.compute.kernels.triton.attention import decode_split_kv as ours
from tests.kernels.triton.attention.paged import NAN, assert_near, paged, sinks_of, slopes_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows_of(starts: Tensor, slots: Tensor) -> PagedRows:
    """Rows of which nobody reads the table or the counts."""
    return PagedRows(slots, slots, starts, slots)


def plan(
    lengths: list[int],
    room: int,
    window: int | None,
    tile: int,
    device: str,
    decode_rows: list[int] | None = None,
    chunk: int | None = None,
    min_tiles: int = 1,
    at_once: int = 10,
) -> tuple[Tensor, Tensor]:
    """Splits of the reference and ours. Rows' slots run backwards; with `decode_rows`, only these have one token."""
    starts = torch.tensor([length - 1 for length in lengths], device=device)
    slots = torch.arange(len(lengths), device=device).flip(0).contiguous()
    chosen = None if decode_rows is None else torch.tensor(decode_rows, device=device)
    tokens = None if chosen is None else 2 * chosen + 1
    found, expected = (torch.full((room, 8), 77, dtype=torch.int32, device=device) for _ in range(2))
    decode = None if chosen is None or tokens is None else DecodeRows(chosen, tokens)
    for plan_kv_splits, splits in ((ours.plan_kv_splits, found), (reference.plan_kv_splits, expected)):
        plan_kv_splits(rows_of(starts, slots), decode, Mask(window, chunk), splits, tile, at_once, min_tiles)
    return found, expected


@pytest.mark.parametrize("window", [None, 1, 8, 100])
@pytest.mark.parametrize("extra", [0, 1, 9, 40])
@pytest.mark.parametrize("lengths", [[1], [640], [3, 1000, 17, 129], [1, 8, 9, 16, 17] * 26, [50] * 33])
@pytest.mark.parametrize(("min_tiles", "at_once"), [(1, 1), (1, 9), (3, 40)])
def test_contexts_are_cut_as_the_reference_cuts_them(
    lengths: list[int], extra: int, window: int | None, min_tiles: int, at_once: int, device: str
) -> None:
    found, expected = plan(lengths, len(lengths) + extra, window, 8, device, min_tiles=min_tiles, at_once=at_once)
    live = expected[:, 6] > 0
    assert torch.equal(found[:, 6], expected[:, 6])
    assert torch.equal(found[live][:, :7], expected[live][:, :7])


@pytest.mark.parametrize("chunk", [1, 8, 100])
def test_splits_begin_with_the_chunk(chunk: int, device: str) -> None:
    found, expected = plan([640, 3, 1000, 100, 101, 99], 20, None, 8, device, chunk=chunk)
    live = expected[:, 6] > 0
    assert torch.equal(found[:, 6], expected[:, 6])
    assert torch.equal(found[live][:, :7], expected[live][:, :7])


@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("decode_rows", [[1, 3], []])
def test_only_rows_of_one_token_are_cut(decode_rows: list[int], padding: int, device: str) -> None:
    found, expected = plan([5, 80, 7, 300], 12, None, 16, device, decode_rows=decode_rows + [-1] * padding)
    live = expected[:, 6] > 0
    assert torch.equal(found[:, 6], expected[:, 6])
    assert torch.equal(found[live][:, :7], expected[live][:, :7])


def test_pieces_cover_what_is_seen_once(device: str) -> None:
    """Whatever the lengths: in order, without gaps, from tile to tile, and no more than there is room for."""
    rng = random.Random(0)
    for _ in range(10):
        lengths = [int(10 ** rng.uniform(0, 4)) for _ in range(rng.randint(1, 40))]
        window, tile = rng.choice([None, 50]), rng.choice([32, 64])
        splits = plan(lengths, len(lengths) + rng.randint(0, 50), window, tile, device)[0].tolist()
        for slot, length in enumerate(reversed(lengths)):
            own = [piece for piece in splits if piece[6] and piece[1] == slot]
            seen_from = 0 if window is None else max(0, length - window)
            assert own[0][2] == seen_from // tile * tile
            assert own[-1][3] == length
            assert all(piece[4] == seen_from and piece[6] == len(own) for piece in own)
            assert [piece[3] for piece in own[:-1]] == [piece[2] for piece in own[1:]]
            assert all(piece[2] % tile == 0 for piece in own)


def check(
    lengths: list[int],
    *,
    heads: int,
    kv_heads: int,
    d: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    window: int | None = None,
    chunk: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
    slopes: bool = False,
    room: int | None = None,
) -> None:
    begins = None if chunk is None else [(length - 1) // chunk * chunk for length in lengths]
    cache = paged(lengths, block_size, kv_heads, d, dtype, device, window, begins)
    tokens = len(lengths) + 1  # the first token belongs to another row
    q = torch.randn(tokens, heads, d).to(dtype).to(device)
    q[0] = NAN
    starts = torch.tensor([0] + [length - 1 for length in lengths], device=device)
    slots = torch.tensor([0, *range(len(lengths))], device=device)
    decode_rows = torch.arange(1, tokens, device=device)
    tile = ours.keys_of_tile(d, q.element_size())
    splits = torch.full((room or len(lengths) + 6, 8), -(2**31), dtype=torch.int32, device=device)  # poison
    decode = DecodeRows(decode_rows, decode_rows)
    ours.plan_kv_splits(rows_of(starts, slots), decode, Mask(window, chunk), splits, tile, 6)
    partials = reference.new_decode_partials(len(splits), heads, kv_heads, d, torch.device(device))
    partials.outputs.fill_(NAN)
    partials.sums.fill_(NAN)
    found, expected = (torch.full_like(q, NAN) for _ in range(2))
    more = sinks_of(heads, device) if sinks else None, slopes_of(heads, device) if slopes else None
    rest = (
        *cache,
        splits,
        partials,
        Scores(d**-0.5, cap, *more),
    )
    for _ in range(2):  # counters are ready again
        ours.decode_attention(q, *rest, found)
    reference.decode_attention(q, *rest, expected)
    assert found[0].isnan().all()
    assert_near(found[1:], expected[1:])
    assert not partials.arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [48, 64, 80, 128, 256])
def test_widths_of_heads(d: int, dtype: torch.dtype, device: str) -> None:
    check([1, 33, 200], heads=4, kv_heads=2, d=d, device=device, dtype=dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (14, 2), (16, 1), (32, 1)])
def test_sizes_of_groups(heads: int, kv_heads: int, device: str) -> None:
    check([70, 5], heads=heads, kv_heads=kv_heads, d=16, device=device)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("window", [None, 1, 7, 32, 100])
def test_block_sizes_and_windows(block_size: int, window: int | None, device: str) -> None:
    check([1, 31, 32, 33, 150], heads=2, kv_heads=1, d=16, device=device, block_size=block_size, window=window)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_scores_are_bounded(cap: float, device: str) -> None:
    check([90, 4], heads=4, kv_heads=2, d=16, device=device, cap=cap)


@pytest.mark.parametrize("room", [3, 12])
@pytest.mark.parametrize("window", [None, 20])
def test_scores_fall_with_the_distance(window: int | None, room: int, device: str) -> None:
    """Of keys in every split alike."""
    check([390, 7, 65], heads=6, kv_heads=2, d=16, device=device, window=window, room=room, slopes=True)


@pytest.mark.parametrize("room", [1, 12])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (20, None), (None, 96)])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_sinks_count_once(window: int | None, chunk: int | None, cap: float | None, room: int, device: str) -> None:
    """In one piece to a row, and in several."""
    more = {"window": window, "chunk": chunk, "cap": cap, "room": max(room, 3), "sinks": True}
    check([390, 7, 65], heads=6, kv_heads=2, d=16, device=device, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("room", [1, 2, 3, 12, 40])
def test_merging(room: int, device: str) -> None:
    """One piece to a row; as many as eight, which are read at once; more."""
    check([390], heads=4, kv_heads=2, d=16, device=device, room=room)


@pytest.mark.parametrize("rows", [17, 127])
def test_many_rows(rows: int, device: str) -> None:
    check([1 + 7 * row % 40 for row in range(rows)], heads=1, kv_heads=1, d=16, device=device)


def test_a_row_that_is_not_a_number_is_alone(device: str) -> None:
    cache = paged([40, 40], 8, 1, 16, torch.float32, device)
    cache.kv.values[cache.table[0, 2]] = NAN
    splits = torch.empty((4, 8), dtype=torch.int32, device=device)
    rows = rows_of(torch.tensor([39, 39], device=device), torch.arange(2, device=device))
    ours.plan_kv_splits(rows, None, Mask(), splits, 32, 4)
    partials = reference.new_decode_partials(4, 2, 1, 16, torch.device(device))
    q, out = torch.randn(2, 2, 16, device=device), torch.empty(2, 2, 16, device=device)
    ours.decode_attention(q, *cache, splits, partials, Scores(0.25), out)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1000] * 256, [130_000], [4096] * 32, [1, 100_000, *range(500, 900)]])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 8, 128), (16, 8, 128), (14, 2, 64), (8, 4, 256)])
def test_real_sizes(lengths: list[int], heads: int, kv_heads: int, d: int) -> None:
    check(lengths, heads=heads, kv_heads=kv_heads, d=d, device="cuda", dtype=torch.bfloat16, room=len(lengths) + 33)


@pytest.mark.parametrize("at_once", [16, 66, 528])
def test_room_for_splits(at_once: int) -> None:
    """One a row at least, more for more rows, and rounds of programs that are full as far as rows allow."""
    rooms = [ours.kv_splits_for(rows, at_once) for rows in range(1, 2000)]
    assert rooms[0] == at_once
    assert all(room >= rows and room % at_once == 0 for rows, room in enumerate(rooms, 1))
    assert rooms == sorted(rooms)


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        ([600] * 32, 5),  # two splits each, which are taken at once, and not three, of which some would wait
        ([600] * 64, 10),  # one piece each
        ([600] * 63 + [100_000], 23),  # as many of the long one as there is room for
        ([*range(1000, 2000, 10)], 16),  # two each: rounds are full, and the last of them is short
    ],
)
def test_pieces_that_take_the_least_time(lengths: list[int], most: int, device: str) -> None:
    """With 66 taken at once, as on an H200 with 8 KV heads; what was measured there."""
    found, expected = plan(lengths, ours.kv_splits_for(len(lengths), 66), None, 64, device, min_tiles=2, at_once=66)
    assert torch.equal(found[:, 6], expected[:, 6])
    longest = max(end - begin for _, _, begin, end, _, _, count, _ in found.tolist() if count)
    assert -(-longest // 64) == most
