"""The pool of KV blocks: reference counts, and a free list that is at the same time the prefix cache.

A block that nobody holds keeps its contents until it is taken again. Those whose contents cannot be found are taken
first, then the one free for the longest time: the free list is the LRU order of the cache, there is no second structure
(after nano-vllm's BlockManager). Knows nothing about sequences or bytes. Block ids run from 1; block 0 is the dummy
that padding writes to and is never handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

DUMMY_BLOCK = 0
BlockKey = tuple[int, bytes]
"""What a full block holds: its KV group, and the hash of all tokens up to its end."""


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
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, with or without contents that may be found again."""
        return len(self._free)

    def blocks_for(self, length: int) -> int:
        """Blocks that `length` tokens take."""
        return -(-length // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """`count` free blocks with one reference each, or None (and nothing taken) when there are fewer."""
        free, references, known = self._free, self._references, self._key_of
        if count > len(free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = free.popitem(last=False)
            references[block] = 1
            if block in known:
                self.forget(block)
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each, which is held or was found by its contents."""
        free, references, known = self._free, self._references, self._key_of
        for block in blocks:
            if references[block] == 0:
                assert block in known, f"block {block} is free and holds nothing known"
                del free[block]
            references[block] += 1

    def is_shared(self, block: int) -> bool:
        """Whether somebody else holds it too, so that it must be copied before it is written."""
        return self._references[block] > 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One holder fewer for each; a block nobody holds is free at once, since all its uses share one stream."""
        free, references, known = self._free, self._references, self._key_of
        for block in blocks:
            assert references[block] > 0, f"block {block} is given back twice"
            references[block] -= 1
            if references[block] == 0:
                free[block] = None
                if block not in known:
                    free.move_to_end(block, last=False)  # nothing is lost when it is taken: before the cached

    # --- contents ---------------------------------------------------------------------------------------------------

    def publish(self, block: int, key: BlockKey) -> None:
        """A held block is full, and this is what it holds. The first block of a key is the one that is found."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, key: BlockKey) -> int | None:
        """A block with these contents, held or free."""
        return self._block_of.get(key)

    def find_run(self, group: int, hashes: Iterable[bytes]) -> tuple[list[bytes], list[int]]:
        """The same for one hash after another, up to the first that no block has: the hashes and their blocks."""
        get, known, blocks = self._block_of.get, [], []
        for digest in hashes:
            block = get((group, digest))
            if block is None:
                break
            known.append(digest)
            blocks.append(block)
        return known, blocks

    def forget(self, block: int) -> None:
        """Its contents are found no more."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def forget_all(self) -> None:
        """Nothing that is there now will be found again."""
        self._key_of.clear()
        self._block_of.clear()
