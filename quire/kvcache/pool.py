"""The pool of KV blocks: reference counts and the free list.

Knows nothing about sequences or bytes. Block ids run from 1; block 0 is the dummy that padding writes to and is never
handed out. Whoever takes a block gives it back; taking, sharing and giving back are the only ways a count changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

DUMMY_BLOCK = 0


class BlockPool:
    """Hands out blocks 1..num_blocks.

    Args:
        num_blocks: Usable blocks, the dummy not counted.
        block_size: Tokens a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * (num_blocks + 1)
        self._free = deque(range(1, num_blocks + 1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that one sequence could hold with the pool to itself."""
        return self.num_blocks * self.block_size

    def blocks_for(self, length: int) -> int:
        """Blocks that `length` tokens take."""
        return -(-length // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """`count` free blocks with one reference each, or None (and nothing taken) when there are fewer."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more holder of a held block."""
        assert self._references[block] > 0, f"block {block} is free"
        self._references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One holder fewer for each; a block nobody holds is free at once, since all its uses share one stream."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is given back twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
