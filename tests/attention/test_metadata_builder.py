"""How rows are tiled: every token once, what takes longest first, and no more gathered than there is memory for."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
from torch import Tensor

from quire.compute.attention.limits import DENSE_MIN_QUERIES, GATHER_CHUNK, PaddedLimits, gathered_tokens
from quire.compute.attention.metadata import (
    IntArray,
    PrefillMetadata,
)
from quire.compute.attention.metadata_builder import (
    PrefillTiling,
    RowKinds,
    build_metadata,
    dense_prefill,
    split_kv,
    tiles_of,
)

TILING = PrefillTiling(
    tile_queries=32, dense_tile_queries=128, dense_min_queries=256, gather_chunk=128, gather_capacity=4096
)


def test_rows_are_told_apart_by_their_tokens() -> None:
    counts, bounds = np.array([1, 300, 2, 255, 256, 1]), np.zeros(6, dtype=np.int64)
    kinds = RowKinds.of(counts, bounds, TILING)
    assert [kinds.decode.tolist(), kinds.prefill.tolist(), kinds.dense.tolist()] == [[0, 5], [2, 3], [1, 4]]
    assert not len(RowKinds.of(counts, bounds, PrefillTiling(32)).dense)
    decode = build_metadata(counts, bounds, TILING).decode
    assert decode is not None
    assert [decode.rows.tolist(), decode.tokens.tolist()] == [[0, 5], [0, 814]]


def test_rows_without_memory_for_gathering_are_not_dense() -> None:
    counts, bounds = np.array([256, 256, 256, 2]), np.array([4000, 3000, 500, 0])
    kinds = RowKinds.of(counts, bounds, TILING)
    assert kinds.dense.tolist() == []
    counts, bounds = np.array([256, 256, 256, 2]), np.array([2000, 1000, 500, 0])
    kinds = RowKinds.of(counts, bounds, TILING)
    assert [kinds.prefill.tolist(), kinds.dense.tolist()] == [[2, 3], [0, 1]]


def test_tiles_cover_every_token_once_and_the_longest_stand_first() -> None:
    rng = random.Random(0)
    for _ in range(50):
        number = rng.randint(1, 9)
        counts = np.array([rng.choice([1, 2, 31, 32, 33, 400]) for _ in range(number)])
        bounds = np.array([rng.randint(0, 900) for _ in range(number)])
        kinds = RowKinds.of(counts, bounds, TILING)
        rows, offsets = tiles_of(counts, bounds, kinds.prefill, TILING.tile_queries)
        covered = sorted(
            (row, at + i) for row, at in zip(rows, offsets, strict=True) for i in range(TILING.tile_queries)
        )
        inside = [(row, at) for row, at in covered if at < counts[row]]
        assert inside == [(row, at) for row in kinds.prefill for at in range(counts[row])]
        last = bounds[rows] + offsets
        assert (last[:-1] >= last[1:]).all()
        check_dense(counts, bounds, kinds)


def check_dense(counts: np.ndarray, bounds: np.ndarray, kinds: RowKinds) -> None:
    """Contexts are gathered whole and apart from each other, and tiles find theirs."""
    dense = dense_prefill(counts, bounds, kinds, TILING)
    assert len(dense.chunks.rows) * TILING.gather_chunk <= TILING.gather_capacity
    places: dict[tuple[int, int], int] = {}  # (row, position) → place
    for chunk, (row, at, n) in enumerate(zip(*map(Tensor.tolist, dense.chunks), strict=True)):
        places |= {(row, at + i): chunk * TILING.gather_chunk + i for i in range(n)}
    assert sorted(places) == [(row, at) for row in kinds.dense for at in range(counts[row] + bounds[row])]
    firsts = counts.cumsum() - counts
    of_token = {firsts[row] + i: (row, bounds[row] + i) for row in kinds.dense for i in range(counts[row])}
    for token, queries, before, base in zip(*map(Tensor.tolist, dense.tiles), strict=True):
        for i in range(queries):
            row, position = of_token.pop(token + i)
            assert position == before + i
            assert places[row, position] == base + position
    assert not of_token


@pytest.mark.parametrize("most", [2, 5, 12, 33])
def test_few_tiles_are_split_along_their_keys(most: int) -> None:
    """Into as many splits as there shall be at most, none of which is empty or shorter than it may be for nothing."""
    rng = random.Random(most)
    tiling = PrefillTiling(
        tile_queries=32,
        max_splits=most,
        max_unshared_splits=most,
        split_keys=16,
        min_split_tiles=2,
        max_splits_of_tile=7,
    )
    seen_split = 0
    for _ in range(60):
        number = rng.randint(1, 6)
        counts = np.array([rng.choice([2, 31, 32, 33, 64]) for _ in range(number)])
        bounds = np.array([int(10 ** rng.uniform(0, 4)) for _ in range(number)])
        tiles = tiles_of(counts, bounds, np.arange(number), 32)
        if len(tiles[0]) > most:
            continue
        whole, (repeated, splits) = list(zip(*tiles, strict=True)), split_kv(tiles, counts, bounds, tiling)
        parts = list(zip(*repeated, splits.numbers, splits.counts, strict=True))
        assert len(parts) <= most
        assert parts == [(*tile, i, n) for tile, n in Counter(part[:2] for part in parts).items() for i in range(n)]
        assert list(dict.fromkeys(part[:2] for part in parts)) == whole
        rows, offsets = repeated
        seen, of_tile = -(-(bounds[rows] + np.minimum(offsets + 32, counts[rows])) // 16), splits.counts
        each = -(-seen // of_tile)
        assert of_tile.max() <= 7
        assert (each * (of_tile - 1) < seen).all()
        assert (each[of_tile > 1] >= 2).all()
        longest = max(2, each.max())
        if longest > max(2, -(-seen.max() // 7)):  # shorter ones would be too many
            assert (-(-seen // (longest - 1)))[splits.numbers == 0].sum() > most
        seen_split += len(parts) > len(whole)
    assert seen_split


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
def test_tiles_are_split_as_often_as_it_saves_time(counts: list[int], bounds: list[int], expected: list[int]) -> None:
    tiling = PrefillTiling(
        16,
        max_splits=33,
        max_unshared_splits=16,
        split_keys=64,
        min_split_tiles=4,
        merge_tiles=6,
        shared_slowdown=1.4,
        max_splits_of_tile=32,
    )
    columns = np.array(counts), np.array(bounds)
    tiles = tiles_of(*columns, np.arange(len(counts)), 16)
    _, splits = split_kv(tiles, *columns, tiling)
    assert splits.counts[splits.numbers == 0].tolist() == expected


def test_tiles_are_few_by_their_tokens() -> None:
    assert [PrefillTiling(16, max_splits=9).splits_kv(tokens) for tokens in (0, 1, 64, 65)] == [
        False,
        True,
        True,
        False,
    ]
    assert [PrefillTiling(64, max_splits=33).splits_kv(tokens) for tokens in (256, 257)] == [True, False]
    assert not PrefillTiling(16).splits_kv(1)


def test_many_tiles_are_not_split() -> None:
    counts, bounds = np.full(7, 2), np.full(7, 900)
    tiles = tiles_of(counts, bounds, np.arange(7), 16)
    tiling = PrefillTiling(16, max_splits=6, split_keys=16, max_splits_of_tile=8)
    assert split_kv(tiles, counts, bounds, tiling)[1].counts.tolist() == [1] * 7


def prefill_of(limits: PaddedLimits, counts: IntArray, bounds: IntArray, tiling: PrefillTiling) -> PrefillMetadata:
    prefill = build_metadata(counts, bounds, tiling, limits).prefill
    assert prefill is not None
    return prefill


@pytest.mark.parametrize("decode_rows", [0, 3])
def test_padded_splits_are_equally_many(decode_rows: int) -> None:
    """What pads them is a tile of the row without tokens that has no split."""
    rng, limits = random.Random(1), PaddedLimits(40, 6, decode_rows)
    tiling = PrefillTiling(16, max_splits=9, split_keys=16, min_split_tiles=1, max_splits_of_tile=8)
    lengths = set()
    for _ in range(40):
        counts = np.array([rng.randint(1, 10) for _ in range(4)] + [0, 0])
        counts[4] = 40 - counts.sum()
        bounds = np.array([rng.randint(0, 300) for _ in range(4)] + [0, 0])
        prefill = prefill_of(limits, counts, bounds, tiling)
        assert prefill.splits is not None
        columns = [column.numpy() for column in (*prefill.tiles[:2], *prefill.splits)]
        lengths |= {len(column) for column in columns}
        real = counts[columns[0]] > columns[1]
        assert [column[~real].tolist() for column in columns] == [[entry] * (~real).sum() for entry in (5, 0, 0, 0)]
        assert not real[real.sum() :].any()
        whole = prefill_of(limits, counts, bounds, PrefillTiling(16))
        rows, offsets = (column.numpy() for column in whole.tiles[:2])
        own = counts[rows] > offsets
        tiles = {*zip(rows[own], offsets[own], strict=True)}
        assert {*zip(columns[0][real], columns[1][real], strict=True)} == tiles
        assert real.sum() <= max(len(tiles), tiling.max_splits)
    assert lengths == {max(40 // 16 + 6, 9)}


@pytest.mark.parametrize("decode_rows", [0, 30])
def test_padded_tiles_are_enough_however_tokens_are_dealt_to_rows(decode_rows: int) -> None:
    """Also where there are more rows than can have several tokens."""
    rng, limits = random.Random(2), PaddedLimits(40, 42, decode_rows)
    longest = 40 // 4 + (20 if decode_rows else 40)
    for each in [1, 2, 3, 5, 6, 40, *[0] * 20]:
        counts = np.zeros(42, dtype=np.int64)
        for row in range(41):
            counts[row] = min(40 - counts.sum(), each or rng.randint(1, 9))
        if decode_rows and (counts == 1).sum() > decode_rows:
            continue
        metadata = build_metadata(counts, 0 * counts, PrefillTiling(4), limits)
        assert metadata.decode is not None
        assert metadata.prefill is not None
        assert [len(column) for column in metadata.decode] == [decode_rows, decode_rows]
        assert [len(column) for column in metadata.prefill.tiles] == [longest, longest, len(counts)]
        rows, offsets, _ = metadata.prefill.tiles
        tiles = zip(rows.tolist(), offsets.tolist(), strict=True)
        expected = [
            (row, at) for row in range(42) if counts[row] > (decode_rows > 0) for at in range(0, counts[row], 4)
        ]
        assert sorted(tiles)[: len(expected)] == expected


@pytest.mark.parametrize(
    ("counts", "limits"),
    [([1, 1], None), ([1, 9, 300], None), ([1, 9], None), ([1, 15, 0], PaddedLimits(16, 3, 2)), ([300], None)],
)
def test_a_copy_of_metadata_is_of_the_same_columns(counts: list[int], limits: PaddedLimits | None) -> None:
    """Each is copied once."""
    tiling = dataclasses.replace(TILING, max_splits=8, split_keys=16, max_splits_of_tile=4)
    metadata = build_metadata(np.array(counts), np.full(len(counts), 40), tiling, limits)
    seen = []
    copy = metadata.copied(lambda column: seen.append(column) or column)  # type: ignore[func-returns-value]
    assert repr(copy) == repr(metadata)
    assert len(seen) == len({id(column) for column in seen}) == repr(metadata).count("tensor(")


@pytest.mark.parametrize(("tokens", "length"), [(700, 700), (8_192, 900), (640, 40_000), (16_384, 131_072)])
def test_gathering_finds_memory_up_to_half_a_gigabyte(tokens: int, length: int) -> None:
    of_token = 2 * 8 * 128 * 2
    room = gathered_tokens(of_token, tokens, length)
    tiling = PrefillTiling(
        16, dense_tile_queries=128, dense_min_queries=DENSE_MIN_QUERIES, gather_chunk=GATHER_CHUNK, gather_capacity=room
    )
    prompts = np.full(tokens // length or 1, min(tokens, length))
    before = np.full(len(prompts), max(0, length - tokens))
    assert len(RowKinds.of(prompts, before, tiling).dense) == len(prompts)
    assert gathered_tokens(16 * of_token, tokens, length) * 16 * of_token <= 2**29
