"""The block table of one sequence: for each KV group, the blocks its tokens stand in.

Owns its blocks: `release` gives every one back. A block that others hold too is copied before it is written. Knows
nothing about requests or plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from quire.kvcache.groups import GroupReach
from quire.kvcache.pool import DUMMY_BLOCK, BlockPool


class TableEntries(NamedTuple):
    """Columns: block `blocks[i]` is entry number `indices[i]` of the table row of group `groups[i]`."""

    groups: list[int]
    indices: list[int]
    blocks: list[int]

    def add(self, group: int, first: int, blocks: Sequence[int]) -> None:
        """Blocks that stand in a row one behind another, from entry `first` on."""
        number = len(blocks)
        self.groups.extend([group] * number)
        self.indices.extend(range(first, first + number))
        self.blocks.extend(blocks)


class Reservation(NamedTuple):
    """What has to happen before a row is written: table entries that are new, and blocks to copy, (from, to)."""

    entries: TableEntries
    copies: list[tuple[int, int]]


class BlockTable:
    """Blocks of one sequence in every KV group. An entry that a window has left behind is the dummy block.

    Args:
        pool: Where blocks come from and go back to.
        groups: How far back each KV group looks.
    """

    def __init__(self, pool: BlockPool, groups: Sequence[GroupReach]) -> None:
        self._pool = pool
        self._groups = groups
        self._rows: list[list[int]] = [[] for _ in groups]
        self._published = 0  # entries whose contents are known to the pool

    @property
    def num_blocks(self) -> int:
        """Blocks held, over all groups."""
        return sum(map(_held, self._rows))

    @property
    def room(self) -> int:
        """Tokens that the blocks there are can hold."""
        return len(self._rows[0]) * self._pool.block_size

    def missing(self, length: int, chunk: int) -> int:
        """Blocks it has yet to take until `length` tokens stand in it, moving by at most `chunk` tokens at a time."""
        size = self._pool.block_size
        needed = sum(group.most_blocks(length, chunk, size) for group in self._groups)
        return max(0, needed - self.num_blocks)

    def reserve(self, start: int, end: int) -> Reservation | None:
        """Room for tokens `start` to `end` that nobody else reads; None (and nothing taken) when blocks are too few."""
        size = self._pool.block_size
        first, stop, written = len(self._rows[0]), -(-end // size), start // size
        shared = self._shared_entries(written, min(first, stop)) if written < first else []
        each = max(0, stop - first)
        blocks = self._pool.take(each * len(self._rows) + len(shared))
        if blocks is None:
            return None
        if len(blocks) == 1 and not shared:  # by far the most frequent: a decoding row in need of its next block
            self._rows[0].append(blocks[0])
            return Reservation(TableEntries([0], [first], blocks), [])
        new, copies = TableEntries([], [], []), []
        for group, entry in shared:
            block, old = blocks.pop(), self._rows[group][entry]
            copies.append((old, block))
            new.add(group, entry, [block])
            self._rows[group][entry] = block
            self._pool.give_back([old])
        for group, row in enumerate(self._rows):
            own = blocks[group * each : (group + 1) * each]
            row += own
            new.add(group, first, own)
        return Reservation(new, copies)

    def leave_behind(self, position: int) -> None:
        """Give back what tokens from `position` on no longer see."""
        for group, row in zip(self._groups, self._rows, strict=True):
            if group.window is None:
                continue
            for entry in reversed(range(min(len(row), group.first_needed(position) // self._pool.block_size))):
                if row[entry] == DUMMY_BLOCK:
                    break  # everything before it was left behind earlier
                self._pool.give_back([row[entry]])
                row[entry] = DUMMY_BLOCK

    def trim(self, length: int) -> None:
        """Give back what lies behind the first `length` tokens."""
        keep = self._pool.blocks_for(length)
        for row in self._rows:
            self._pool.give_back(block for block in reversed(row[keep:]) if block > DUMMY_BLOCK)
            del row[keep:]
        self._published = min(self._published, keep)

    def release(self) -> None:
        """Give every block back, the last ones first, so that the beginnings are found for the longest time."""
        for row in self._rows:
            self._pool.give_back(block for block in reversed(row) if block > DUMMY_BLOCK)
            row.clear()
        self._published = 0

    def entries(self) -> TableEntries:
        """The whole table, for a slot that knows nothing of it."""
        all_entries = TableEntries([], [], [])
        for group, row in enumerate(self._rows):
            first = next((entry for entry, block in enumerate(row) if block != DUMMY_BLOCK), len(row))
            all_entries.add(group, first, row[first:])  # what a window has left behind lies before all else
        return all_entries

    # --- sharing ----------------------------------------------------------------------------------------------------

    def covers(self, position: int) -> bool:
        """Whether it still holds all that a token at `position` sees."""
        size = self._pool.block_size
        spans = (
            row[group.first_needed(position) // size : self._pool.blocks_for(position + 1)]
            for group, row in zip(self._groups, self._rows, strict=True)
        )
        return all(block > DUMMY_BLOCK for span in spans for block in span)

    def fork(self, parent: BlockTable, length: int) -> None:
        """Hold the parent's blocks of its first `length` tokens as well; this table must be empty."""
        assert not self._rows[0], "only an empty table can fork"
        count = self._pool.blocks_for(length)
        for mine, theirs in zip(self._rows, parent._rows, strict=True):
            mine += theirs[:count]
            self._pool.share(block for block in mine if block != DUMMY_BLOCK)
        self._published = min(parent._published, length // self._pool.block_size)

    def adopt(self, hashes: Iterable[bytes], length: int) -> int:
        """Hold the blocks of the longest prefix that all groups still have; its length in tokens. The table must be
        empty.

        A group with a window needs only the blocks that the next token sees.

        Args:
            hashes: The chain of the sequence; read as far as there may be a hit.
            length: Tokens that may be found at most.
        """
        assert not self._rows[0], "only an empty table can adopt"
        pool, size = self._pool, self._pool.block_size
        whole = next((number for number, group in enumerate(self._groups) if group.window is None), None)
        promising, of_whole = list[bytes](), list[int]()
        if whole is None:
            promising = list(islice(hashes, length // size))
        else:  # no hit goes beyond the first block that is missing where everything is seen
            promising, of_whole = pool.find_run(whole, islice(hashes, length // size))
        found: list[Sequence[int | None]] = [
            of_whole if group == whole else [pool.find((group, digest)) for digest in promising]
            for group in range(len(self._groups))
        ]
        count = len(promising) if len(found) == 1 and whole is not None else self._longest_hit(found)
        for group, row, blocks in zip(self._groups, self._rows, found, strict=True):
            needed = min(count, group.first_needed(count * size) // size)
            own = [block for block in blocks[needed:count] if block is not None]
            assert len(own) == count - needed
            row += [DUMMY_BLOCK] * needed + own
            self._pool.share(own)
        self._published = count
        return count * self._pool.block_size

    def publish(self, hashes: Sequence[bytes], length: int) -> None:
        """The full blocks among the first `length` tokens hold what `hashes` say and are found from now on."""
        count = length // self._pool.block_size
        for entry in range(self._published, count):
            for group, row in enumerate(self._rows):
                if row[entry] != DUMMY_BLOCK:
                    self._pool.publish(row[entry], (group, hashes[entry]))
        self._published = max(self._published, count)

    def disown_contents(self) -> None:
        """What stands in its blocks is broken: nobody may find it."""
        for row in self._rows:
            for block in row:
                self._pool.forget(block)

    # --- swapping ---------------------------------------------------------------------------------------------------

    def swap_out(self, host_blocks: list[int]) -> list[tuple[int, int]]:
        """Give every device block back after its contents went to a host block: (device, host) pairs.

        Args:
            host_blocks: `num_blocks` of them; the table's entries name them until `swap_in`.
        """
        pairs: list[tuple[int, int]] = []
        for row in self._rows:
            for entry, block in enumerate(row):
                if block != DUMMY_BLOCK:
                    pairs.append((block, host_blocks[len(pairs)]))
                    row[entry] = ~pairs[-1][1]  # a host block, as a negative number: the table is not for use now
        self._pool.give_back(device for device, _ in reversed(pairs))
        self._published = 0
        return pairs

    def swap_in(self) -> list[tuple[int, int]] | None:
        """Take device blocks for what is on the host: (host, device) pairs; None when blocks are too few."""
        swapped = [(row, entry) for row in self._rows for entry, block in enumerate(row) if block < 0]
        blocks = self._pool.take(len(swapped))
        if blocks is None:
            return None
        pairs: list[tuple[int, int]] = []
        for (row, entry), block in zip(swapped, blocks, strict=True):
            pairs.append((~row[entry], block))
            row[entry] = block
        return pairs

    def drop_swapped(self) -> list[int]:
        """Forget a swapped table; the host blocks it named."""
        hosts = [~block for row in self._rows for block in row if block < 0]
        for row in self._rows:
            row.clear()
        return hosts

    # --- below ------------------------------------------------------------------------------------------------------

    def _shared_entries(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(group, entry) of the entries from `start` to `stop` that somebody else holds too."""
        return [
            (group, entry)
            for group, row in enumerate(self._rows)
            for entry in range(start, stop)
            if row[entry] != DUMMY_BLOCK and self._pool.is_shared(row[entry])
        ]

    def _longest_hit(self, found: Sequence[Sequence[int | None]]) -> int:
        """The largest number of blocks such that every group has all of them that the next token sees."""
        size = self._pool.block_size
        runs = []  # by group: how many blocks in a row end at each entry
        for blocks in found:
            run, ends = 0, []
            for block in blocks:
                run = run + 1 if block is not None else 0
                ends.append(run)
            runs.append(ends)
        for count in range(len(found[0]), 0, -1):
            needed = (count - group.first_needed(count * size) // size for group in self._groups)
            if all(ends[count - 1] >= need for ends, need in zip(runs, needed, strict=True)):
                return count
        return 0


def _held(row: Sequence[int]) -> int:
    """Blocks among a row's entries. What a window has left behind lies before all else, and all are swapped or none."""
    return len(row) if row and row[0] > DUMMY_BLOCK else sum(block > DUMMY_BLOCK for block in row)
