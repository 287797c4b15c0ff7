"""The pool of host blocks: what preempted sequences hold, and what the prefix cache keeps beyond the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.scheduling.kvcache.block_pool import BlockKey
from quire.scheduling.kvcache.host_index import HostIndex


class HostPool:
    """Hands out host blocks 0..num_blocks - 1 as few runs of consecutive numbers: a worker copies a run at once.

    A block with a key keeps its contents when nobody holds it any more. Such blocks are allocated after all others, the
    one first that was not used for the longest time.

    Attributes:
        num_blocks: Blocks that the worker has ready, free or not.
        num_free: Number of host blocks that nobody holds, with or without cached contents.
        index: Is told of blocks that lose their contents; None: nobody outlives the pool.
    """

    def __init__(self, num_blocks: int = 0, index: HostIndex | None = None) -> None:
        self.index = index
        self.num_blocks = self.num_free = 0
        self._free: list[range] = []  # without contents: runs, the lowest first; no two of them touch
        self._unheld: OrderedDict[int, None] = OrderedDict()  # free with cached contents, the least recently used first
        self._holders: dict[int, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}
        self.grow(num_blocks)

    @property
    def num_cached(self) -> int:
        """Number of host blocks with cached contents, held or not."""
        return len(self._key_of)

    def grow(self, num_blocks: int) -> None:
        """Take in that blocks 0..num_blocks - 1 are ready. Nothing changes if that many were ready before."""
        if num_blocks > self.num_blocks:
            added = range(self.num_blocks, num_blocks)
            self.num_free += len(added)
            if self._free and self._free[-1].stop == added.start:
                added = range(self._free.pop().start, num_blocks)
            self._free.append(added)
            self.num_blocks = num_blocks

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` host blocks, of which as many must be free: from the smallest run that has them all, or else
        from the largest runs, and then those with cached contents."""
        assert count <= self.num_free
        allocated: list[int] = []
        while self._free and (left := count - len(allocated)):
            enough = [run for run in self._free if len(run) >= left]
            run = min(enough, key=len) if enough else max(self._free, key=len)
            allocated += run[:left]
            at = self._free.index(run)
            self._free[at : at + 1] = [run[left:]] if len(run) > left else []
        while len(allocated) < count:
            block, _ = self._unheld.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            allocated.append(block)
        self._holders.update(dict.fromkeys(allocated, 1))
        self.num_free -= count
        if self.index is not None:
            self.index.forget(allocated)
        return allocated

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block, which is held already or has cached contents."""
        for block in blocks:
            if block in self._unheld:
                del self._unheld[block]
                self.num_free -= 1
            self._holders[block] = self._holders.get(block, 0) + 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block. One without holders and without a key loses its contents."""
        empty = []
        for block in blocks:
            assert block in self._holders, "host blocks are freed twice"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            self.num_free += 1
            if block in self._key_of:
                self._unheld[block] = None
            else:
                empty.append(block)
        if empty:
            self._join(empty)

    # --- prefix cache -----------------------------------------------------------------------------------------------

    def cache_block(self, block: int, key: BlockKey) -> None:
        """Enter a held block into the cache, under a key that no other block has."""
        assert key not in self._block_of and block not in self._key_of, "contents are cached twice"
        self._block_of[key] = block
        self._key_of[block] = key

    def get_cached_block(self, key: BlockKey) -> int | None:
        """Return the block with these contents."""
        return self._block_of.get(key)

    def key_of(self, block: int) -> BlockKey | None:
        """Return the key of a block; None if its contents are not cached."""
        return self._key_of.get(block)

    def cached_blocks(self) -> list[tuple[int, BlockKey]]:
        """Return all blocks with cached contents, and their keys."""
        return list(self._key_of.items())

    def touch(self, block: int) -> None:
        """Note that cached contents are used."""
        if block in self._unheld:
            self._unheld.move_to_end(block)

    def evict(self, key: BlockKey) -> None:
        """Take the block with this key out of the cache, if there is one."""
        block = self._block_of.pop(key, None)
        if block is not None:
            del self._key_of[block]
            if self.index is not None:
                self.index.forget([block])
            if block in self._unheld:
                del self._unheld[block]
                self._join([block])

    def reset_prefix_cache(self) -> None:
        """Evict all blocks."""
        if self.index is not None:
            self.index.forget(self._key_of)
        self._key_of.clear()
        self._block_of.clear()
        self._join(self._unheld)
        self._unheld.clear()

    def inherit(self, num_blocks: int) -> None:
        """Take in that so many blocks are ready, with the contents of the index. Called once, of an empty pool."""
        assert not self.num_blocks, "blocks are there already"
        assert self.index is not None, "nothing to inherit"
        self.num_blocks = self.num_free = num_blocks
        for block, key in self.index.entries():
            if block < num_blocks and key not in self._block_of:
                self._block_of[key] = block
                self._key_of[block] = key
                self._unheld[block] = None
        self._join(block for block in range(num_blocks) if block not in self._key_of)

    def _join(self, blocks: Iterable[int]) -> None:
        """Add blocks without contents to the free runs."""
        free: list[range] = []
        for run in sorted([*self._free, *(range(block, block + 1) for block in blocks)], key=lambda run: run.start):
            if free and run.start <= free[-1].stop:
                assert run.start == free[-1].stop, "host blocks are freed twice"
                run = range(free.pop().start, run.stop)
            free.append(run)
        self._free = free
