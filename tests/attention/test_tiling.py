"""How rows are cut: everything once, what takes longest first, and no more in one piece than there is room for."""

from __future__ import annotations

import random

import numpy as np

from quire.attention import tiling
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
