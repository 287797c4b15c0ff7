"""How rows are cut: everything once, what takes longest first, and no more in one piece than there is room for."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from quire.attention import tiling
from quire.attention.backend import Room
from quire.attention.gathered_kv import DENSE_MIN_QUERIES, PACK, gathered_tokens
from quire.attention.tiling import Kinds, TileSizes

SIZES = TileSizes(tile=32, long_tile=128, long_from=256, pack=128, room=4096)


def test_rows_are_told_apart_by_their_tokens() -> None:
    counts, bounds = np.array([1, 300, 2, 255, 256, 1]), np.zeros(6, dtype=np.int64)
    kinds = Kinds.of(counts, bounds, SIZES)
    assert [kinds.single.tolist(), kinds.short.tolist(), kinds.long.tolist()] == [[0, 5], [2, 3], [1, 4]]
    assert not len(Kinds.of(counts, bounds, TileSizes(32)).long)
    assert [column.tolist() for column in tiling.singles(counts, kinds)] == [[0, 5], [0, 814]]


def test_long_rows_without_room_are_short() -> None:
    counts, bounds = np.array([256, 256, 256, 2]), np.array([4000, 3000, 500, 0])
    kinds = Kinds.of(counts, bounds, SIZES)
    assert kinds.long.tolist() == []
    counts, bounds = np.array([256, 256, 256, 2]), np.array([2000, 1000, 500, 0])
    kinds = Kinds.of(counts, bounds, SIZES)
    assert [kinds.short.tolist(), kinds.long.tolist()] == [[2, 3], [0, 1]]


def test_tiles_cover_every_token_once_and_the_longest_stand_first() -> None:
    rng = random.Random(0)
    for _ in range(50):
        number = rng.randint(1, 9)
        counts = np.array([rng.choice([1, 2, 31, 32, 33, 400]) for _ in range(number)])
        bounds = np.array([rng.randint(0, 900) for _ in range(number)])
        kinds = Kinds.of(counts, bounds, SIZES)
        rows, offsets = tiling.tiles(counts, bounds, kinds.short, SIZES.tile)
        assert len(rows) == tiling.number_of_tiles(counts, kinds.short, SIZES.tile)
        covered = sorted((row, at + i) for row, at in zip(rows, offsets, strict=True) for i in range(SIZES.tile))
        inside = [(row, at) for row, at in covered if at < counts[row]]
        assert inside == [(row, at) for row in kinds.short for at in range(counts[row])]
        last = bounds[rows] + offsets
        assert (last[:-1] >= last[1:]).all()
        check_long(counts, bounds, kinds)


def check_long(counts: np.ndarray, bounds: np.ndarray, kinds: Kinds) -> None:
    """Contexts are packed whole and apart from each other, and tiles find theirs."""
    pack_rows, pack_offsets, pack_counts = tiling.packs(counts, bounds, kinds, SIZES)
    assert len(pack_rows) * SIZES.pack <= SIZES.room
    places: dict[tuple[int, int], int] = {}  # (row, position) → place
    for pack, (row, at, n) in enumerate(zip(pack_rows, pack_offsets, pack_counts, strict=True)):
        places |= {(row, at + i): pack * SIZES.pack + i for i in range(n)}
    assert sorted(places) == [(row, at) for row in kinds.long for at in range(counts[row] + bounds[row])]
    firsts = counts.cumsum() - counts
    of_token = {firsts[row] + i: (row, bounds[row] + i) for row in kinds.long for i in range(counts[row])}
    for token, queries, before, base in zip(*tiling.long_tiles(counts, bounds, kinds, SIZES), strict=True):
        for i in range(queries):
            row, position = of_token.pop(token + i)
            assert position == before + i
            assert places[row, position] == base + position
    assert not of_token


@pytest.mark.parametrize("most", [2, 5, 12, 33])
def test_few_tiles_are_cut_along_what_they_see(most: int) -> None:
    """Into as many parts as there shall be at most, none of which is empty or shorter than it may be for nothing."""
    rng = random.Random(most)
    sizes = TileSizes(tile=32, parts=most, alone=most, keys=16, fewest=2, most_of_tile=7)
    seen_cut = 0
    for _ in range(60):
        number = rng.randint(1, 6)
        counts = np.array([rng.choice([2, 31, 32, 33, 64]) for _ in range(number)])
        bounds = np.array([int(10 ** rng.uniform(0, 4)) for _ in range(number)])
        tiles = tiling.tiles(counts, bounds, np.arange(number), 32)
        if len(tiles[0]) > most:
            continue
        whole, cut = list(zip(*tiles, strict=True)), tiling.parts(tiles, counts, bounds, sizes)
        parts = list(zip(*cut, strict=True))
        assert len(parts) <= most
        assert parts == [(*tile, i, n) for tile, n in Counter(part[:2] for part in parts).items() for i in range(n)]
        assert list(dict.fromkeys(part[:2] for part in parts)) == whole
        seen, of_tile = -(-(bounds[cut[0]] + np.minimum(cut[1] + 32, counts[cut[0]])) // 16), cut[3]
        each = -(-seen // of_tile)
        assert of_tile.max() <= 7
        assert (each * (of_tile - 1) < seen).all()
        assert (each[of_tile > 1] >= 2).all()
        longest = max(2, each.max())
        if longest > max(2, -(-seen.max() // 7)):  # shorter ones would be too many
            assert (-(-seen // (longest - 1)))[cut[2] == 0].sum() > most
        seen_cut += len(parts) > len(whole)
    assert seen_cut


@pytest.mark.parametrize(
    ("counts", "bounds", "expected"),
    [
        ([224], [0], [1] * 14),  # as many as multiprocessors, each as short as merging
        ([112, 112], [256, 256], [1] * 14),
        ([16], [400], [1]),
        ([16], [1000], [4]),  # 4 + 6 for 16
        ([208], [1000], [3] * 4 + [2] * 9),  # 8 · 1.4 + 6 for 19
        ([208], [700], [1] * 13),
        ([50], [2000], [9, 8, 8, 8]),  # two share a multiprocessor: 4 · 1.4 for 9
        ([16], [20_000], [32]),
    ],
)
def test_tiles_are_cut_as_often_as_it_saves_time(counts: list[int], bounds: list[int], expected: list[int]) -> None:
    sizes = TileSizes(16, parts=33, alone=16, keys=64, fewest=4, merge=6, shared=1.4, most_of_tile=32)
    columns = np.array(counts), np.array(bounds)
    tiles = tiling.tiles(*columns, np.arange(len(counts)), 16)
    _, _, part, of_tile = tiling.parts(tiles, *columns, sizes)
    assert of_tile[part == 0].tolist() == expected


def test_tiles_are_few_by_their_tokens() -> None:
    assert [TileSizes(16, parts=9).are_few(tokens) for tokens in (0, 1, 64, 65)] == [False, True, True, False]
    assert [TileSizes(64, parts=33).are_few(tokens) for tokens in (256, 257)] == [True, False]
    assert not TileSizes(16).are_few(1)


def test_many_tiles_are_not_cut() -> None:
    counts, bounds = np.full(7, 2), np.full(7, 900)
    tiles = tiling.tiles(counts, bounds, np.arange(7), 16)
    assert tiling.parts(tiles, counts, bounds, TileSizes(16, parts=6, keys=16, most_of_tile=8))[3].tolist() == [1] * 7


@pytest.mark.parametrize("singles", [0, 3])
def test_parts_have_room_in_steps_of_one_size(singles: int) -> None:
    """What pads them is a tile of the row without tokens that has no part."""
    rng, sizes, room = random.Random(1), TileSizes(16, parts=9, keys=16, fewest=1, most_of_tile=8), Room(40, 6, singles)
    lengths = set()
    for _ in range(40):
        counts = np.array([rng.randint(1, 10) for _ in range(4)] + [0, 0])
        counts[4] = 40 - counts.sum()
        bounds = np.array([rng.randint(0, 300) for _ in range(4)] + [0, 0])
        _, tiles = tiling.singles_and_tiles_within(room, counts, bounds, 16)
        cut = tiling.parts_within(room, tiles, counts, bounds, sizes)
        lengths |= {len(column) for column in cut}
        real = counts[cut[0]] > cut[1]
        assert [column[~real].tolist() for column in cut] == [[entry] * (~real).sum() for entry in (5, 0, 0, 0)]
        assert not real[real.sum() :].any()
        own = tuple(column[counts[tiles[0]] > tiles[1]] for column in tiles)
        assert {*zip(cut[0][real], cut[1][real], strict=True)} == {*zip(*own, strict=True)}
        assert real.sum() <= max(len(own[0]), sizes.parts)
    assert lengths == {max(40 // 16 + 6, 9)}


@pytest.mark.parametrize("singles", [0, 30])
def test_tiles_have_room_however_tokens_are_dealt_to_rows(singles: int) -> None:
    """Also where there are more rows than can have several tokens."""
    rng, room = random.Random(2), Room(40, 42, singles)
    longest = 40 // 4 + (20 if singles else 40)
    for each in [1, 2, 3, 5, 6, 40, *[0] * 20]:
        counts = np.zeros(42, dtype=np.int64)
        for row in range(41):
            counts[row] = min(40 - counts.sum(), each or rng.randint(1, 9))
        if singles and (counts == 1).sum() > singles:
            continue
        single, tiles = tiling.singles_and_tiles_within(room, counts, 0 * counts, 4)
        assert [len(column) for column in (*single, *tiles)] == [singles, singles, longest, longest]
        of_tile = [(row, at) for row in range(42) if counts[row] > (singles > 0) for at in range(0, counts[row], 4)]
        assert sorted(zip(*tiles, strict=True))[: len(of_tile)] == of_tile


@pytest.mark.parametrize(("tokens", "length"), [(700, 700), (8_192, 900), (640, 40_000), (16_384, 131_072)])
def test_long_rows_find_room_but_for_more_than_half_a_gigabyte(tokens: int, length: int) -> None:
    of_token = 2 * 8 * 128 * 2
    room = gathered_tokens(of_token, tokens, length)
    sizes = TileSizes(16, long_tile=128, long_from=DENSE_MIN_QUERIES, pack=PACK, room=room)
    prompts = np.full(tokens // length or 1, min(tokens, length))
    before = np.full(len(prompts), max(0, length - tokens))
    assert len(Kinds.of(prompts, before, sizes).long) == len(prompts)
    assert gathered_tokens(16 * of_token, tokens, length) * 16 * of_token <= 2**29
