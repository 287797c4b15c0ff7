"""The block table of one sequence: for each KV group, the blocks its tokens stand in.

Knows nothing about requests or plans. Owns its blocks: `release` gives every one back.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.kvcache.pool import BlockPool


class TableChange(NamedTuple):
    """Block `block` is now entry number `entry` of the table row of `group`."""

    group: int
    entry: int
    block: int


class BlockTable:
    """Blocks for the first `length` tokens of a sequence, in every KV group.

    Args:
        pool: Where blocks come from and go back to.
        num_groups: KV groups of the model; each has a row of its own.
    """

    def __init__(self, pool: BlockPool, num_groups: int) -> None:
        self._pool = pool
        self._rows: list[list[int]] = [[] for _ in range(num_groups)]

    @property
    def num_blocks(self) -> int:
        """Blocks held, over all groups."""
        return sum(map(len, self._rows))

    def missing(self, length: int) -> int:
        """Blocks that `grow(length)` would take."""
        return max(0, self._pool.blocks_for(length) - len(self._rows[0])) * len(self._rows)

    def grow(self, length: int) -> list[TableChange] | None:
        """Take blocks until `length` tokens fit; the changes, or None (and nothing taken) when the pool has too few."""
        start, stop = len(self._rows[0]), self._pool.blocks_for(length)
        if stop <= start:
            return []
        blocks = self._pool.take((stop - start) * len(self._rows))
        if blocks is None:
            return None
        changes = []
        for group, row in enumerate(self._rows):
            for index in range(start, stop):
                block = blocks.pop()
                row.append(block)
                changes.append(TableChange(group, index, block))
        return changes

    def release(self) -> None:
        """Give every block back; the table is empty afterwards."""
        for row in self._rows:
            self._pool.give_back(reversed(row))
            row.clear()
