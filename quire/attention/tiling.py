"""How a step's rows are cut for a GPU, as far as the host knows them: into columns of integers that travel in its copy.

Rows of one token are only listed, since their lengths are known on the device. Longer rows are cut along their queries.
Where these tiles are too few to fill the device, they are also cut along what they see. Long rows among them are read
from memory in which their contexts lie in one piece, packed one behind another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.attention.backend import Ints, Room


@dataclass(frozen=True)
class TileSizes:
    """What the kernels take.

    Attributes:
        tile: Query tokens of a tile.
        long_tile: Of a tile of a long row.
        long_from: Query tokens from which on a row is long; None: no row is.
        pack: Contexts are packed in pieces of so many tokens.
        room: Tokens of all packed contexts; rows that find no room are not long.
        parts: Where tiles are few, they are cut along what they see, into so many parts at most.
        alone: So many parts have a multiprocessor each.
        few: Tokens up to which tiles may be few.
        keys: Parts begin at multiples of so many positions.
        fewest: They have so many times as many positions, unless their tile sees less.
        merge: Merging takes as long as a part of so many times as many positions.
        shared: A part that shares its multiprocessor takes so many times as long.
        most_of_tile: Parts of one tile.
    """

    tile: int
    long_tile: int = 1
    long_from: int | None = None
    pack: int = 1
    room: int = 0
    parts: int = 0
    alone: int = 0
    few: int = 256
    keys: int = 1
    fewest: int = 1
    merge: float = 0
    shared: float = 1
    most_of_tile: int = 1

    def are_few(self, tokens: int) -> bool:
        """Whether tiles of so many tokens are cut along what they see. If so, those of fewer tokens are too."""
        return 0 < 2 * _ceil(tokens, self.tile) <= self.parts and tokens <= self.few


@dataclass(frozen=True)
class Kinds:
    """The numbers of a step's rows, by what serves them; a context's length is exact for rows of several tokens."""

    single: Ints
    short: Ints
    long: Ints

    @classmethod
    def of(cls, counts: Ints, bounds: Ints, sizes: TileSizes) -> Kinds:
        """Of rows with so many tokens in the step and at most so many before it."""
        single, several = (counts == 1).nonzero()[0], (counts > 1).nonzero()[0]
        if sizes.long_from is None:
            return cls(single, several, several[:0])
        long = counts[several] >= sizes.long_from
        packed = -(-(counts[several] + bounds[several]) // sizes.pack) * sizes.pack
        long &= np.cumsum(packed * long) <= sizes.room
        return cls(single, several[~long], several[long])


def singles(counts: Ints, kinds: Kinds) -> tuple[Ints, Ints]:
    """Rows of one token, and each one's place in the batch."""
    return kinds.single, _firsts(counts)[kinds.single]


def singles_and_tiles_within(
    room: Room, counts: Ints, bounds: Ints, size: int
) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """`singles` and `tiles` of a step without long rows, each as long as such steps need them at most.

    What pads them is skipped by kernels: a single below 0, and tiles of the last row, which has no token.
    """
    assert len(counts) == room.rows and not counts[-1]
    fewest = 2 if room.singles else 1  # tokens of a row that is cut into tiles
    single = (counts == 1).nonzero()[0] if room.singles else counts[:0]
    of_tile, offsets = tiles(counts, bounds, (counts >= fewest).nonzero()[0], size)
    most = room.tokens // size + min(room.rows, room.tokens // fewest)
    return (
        (_padded(single, room.singles, -1), _padded(_firsts(counts)[single], room.singles, 0)),
        (_padded(of_tile, most, room.rows - 1), _padded(offsets, most, 0)),
    )


def tiles(counts: Ints, bounds: Ints, rows: Ints, size: int) -> tuple[Ints, Ints]:
    """Rows and offsets of tiles of `size` tokens: those that take longest first."""
    of_tile, offsets = _cut(counts, rows, size)
    order = np.argsort(-(bounds[of_tile] + offsets), kind="stable")
    return of_tile[order], offsets[order]


def parts(tiles: tuple[Ints, Ints], counts: Ints, bounds: Ints, sizes: TileSizes) -> tuple[Ints, Ints, Ints, Ints]:
    """Rows and offsets of tiles, each as often as it has parts; their numbers, and how many they are.

    They are about equally long, and as few as fill the device, with one or several on a multiprocessor, or the tiles
    themselves, whichever is estimated to take least time.
    """
    of_tile, offsets = tiles
    ends = bounds[of_tile] + np.minimum(offsets + sizes.tile, counts[of_tile])
    seen = (-(-ends // sizes.keys)).tolist()  # so few that lists are faster
    longest = _longest_part(seen, sizes)
    number = np.array([_ceil(s, _ceil(s, _ceil(s, longest))) for s in seen])  # none of them empty
    of_part = np.arange(number.sum()) - np.repeat(_firsts(number), number)
    return np.repeat(of_tile, number), np.repeat(offsets, number), of_part, np.repeat(number, number)


def _longest_part(seen: list[int], sizes: TileSizes) -> int:
    """Of tiles that see so many times sizes.keys positions."""
    whole = max(seen)

    def within(most: int) -> int:
        """The shortest of at most so many parts, as far as there is one."""
        shortest = max(sizes.fewest, _ceil(whole, sizes.most_of_tile))
        return bisect_left(range(whole), True, shortest, key=lambda n: sum(_ceil(s, n) for s in seen) <= most)

    def takes(longest: int) -> float:
        shared = sum(_ceil(s, longest) for s in seen) > sizes.alone
        return longest * (sizes.shared if shared else 1) + (sizes.merge if longest < whole else 0)

    if whole <= max(sizes.fewest, sizes.merge):
        return whole
    return min((whole, within(sizes.alone), within(sizes.parts)), key=takes)


def parts_within(
    room: Room, tiles: tuple[Ints, Ints], counts: Ints, bounds: Ints, sizes: TileSizes
) -> tuple[Ints, Ints, Ints, Ints]:
    """`parts` of the tiles that `singles_and_tiles_within` says, as many as such steps have at most."""
    real = counts[tiles[0]] > tiles[1]
    own = (tiles[0][real], tiles[1][real])
    number = np.ones(len(own[0]), dtype=np.int64)
    cut = (*own, 0 * number, number)
    if 0 < len(number) < sizes.parts:
        cut = parts(own, counts, bounds, sizes)
    most = max(len(tiles[0]), sizes.parts)
    rows, offsets, numbers, of_tile = cut
    return (
        _padded(rows, most, room.rows - 1),
        _padded(offsets, most, 0),
        _padded(numbers, most, 0),
        _padded(of_tile, most, 0),
    )


def long_tiles(counts: Ints, bounds: Ints, kinds: Kinds, sizes: TileSizes) -> tuple[Ints, Ints, Ints, Ints]:
    """See the kernel prefill_attention_dense: tokens, queries, befores and bases of its tiles, longest first."""
    rows, offsets = tiles(counts, bounds, kinds.long, sizes.long_tile)
    lengths = (counts + bounds)[kinds.long]
    packed = -(-lengths // sizes.pack) * sizes.pack
    bases = np.zeros_like(counts)
    bases[kinds.long] = packed.cumsum() - packed
    queries = np.minimum(counts[rows] - offsets, sizes.long_tile)
    return _firsts(counts)[rows] + offsets, queries, bounds[rows] + offsets, bases[rows]


def packs(counts: Ints, bounds: Ints, kinds: Kinds, sizes: TileSizes) -> tuple[Ints, Ints, Ints]:
    """See the kernel gather_kv: rows, offsets and token counts of its packs."""
    lengths = counts + bounds
    rows, offsets = _cut(lengths, kinds.long, sizes.pack)
    return rows, offsets, np.minimum(lengths[rows] - offsets, sizes.pack)


def number_of_tiles(counts: Ints, rows: Ints, size: int) -> int:
    """How many tiles of `size` tokens these rows have."""
    return int((-(-counts[rows] // size)).sum())


def concatenated(columns: Sequence[tuple[Ints, ...]]) -> tuple[Ints, ...]:
    """Several times the same columns, one behind another."""
    return tuple(np.concatenate(parts) for parts in zip(*columns, strict=True))


def _padded(column: Ints, length: int, entry: int) -> Ints:
    """The column, and the entry behind it as often as it is shorter than that."""
    padded = np.full(length, entry, dtype=np.int64)
    padded[: len(column)] = column
    return padded


def _ceil(n: int, of: int) -> int:
    return -(-n // of)


def _firsts(counts: Ints) -> Ints:
    return counts.cumsum() - counts


def _cut(lengths: Ints, rows: Ints, size: int) -> tuple[Ints, Ints]:
    """Rows and offsets of the pieces of `size` that these rows have, in order."""
    of_row = -(-lengths[rows] // size)
    of_piece = np.repeat(rows, of_row)
    return of_piece, (np.arange(len(of_piece)) - np.repeat(_firsts(of_row), of_row)) * size
