"""The pool of KV blocks: reference counts, and a free list that is at the same time the prefix cache.

A free block keeps its contents until it is allocated again. Blocks without cached contents are allocated first, then
the one that has been free for the longest time: the free list is the LRU order of the cache, there is no second
structure (after nano-vllm's BlockManager). Retained blocks, which a session will need again, are set apart from it
until their time is over, and are allocated last. Knows nothing about sequences or bytes. Block ids run from 1; block 0
is the dummy that padding writes to, and is never allocated.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

DUMMY_BLOCK = 0
BlockKey = tuple[int, bytes]
"""Identifies a full block's contents: its KV group, and the hash of all tokens up to its end."""


_MAX_OUTDATED = 1_024
"""Entries of the heap of retained blocks that may be out of date, beyond as many as there are blocks."""
_HELD = b".hs"  # free, held, held by several,
_CACHED = b"cHS"  # and the same with cached contents
_HOLDERS = bytes([0, 1, *[2] * 254])
_LETTERS = (_HELD + _CACHED).ljust(256)


class BlockPool:
    """Hands out blocks 1..num_blocks, of `block_size` tokens each; block 0 is the dummy. At most `most_retained` free
    blocks are retained at a time.

    Attributes:
        has_cached_watched: Whether a block with a key given to `watch` has entered the cache since.
        on_reuse: Takes a block with cached contents out of the cache as it is allocated. A tier keeps what it held.
    """

    def __init__(self, num_blocks: int, block_size: int, most_retained: int = 0) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.most_retained = most_retained
        self._retained: OrderedDict[int, float] = OrderedDict()  # free as well; by block, until when
        self._retained_until: list[tuple[float, int]] = []  # a heap, with entries that are out of date
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}
        self._watched: set[BlockKey] = set()
        self.has_cached_watched = False
        self.on_reuse: Callable[[int], None] = self.evict

    @property
    def num_free(self) -> int:
        """Number of blocks that nobody holds, with or without cached contents."""
        return len(self._free) + len(self._retained)

    @property
    def num_retained(self) -> int:
        """Number of free blocks that are retained."""
        return len(self._retained)

    def blocks_for(self, length: int) -> int:
        """Return how many blocks `length` tokens take."""
        return -(-length // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` free blocks with one reference each. None, and nothing is allocated, if fewer are free."""
        free, ref_counts, cached = self._free, self._ref_counts, self._key_of
        if count > len(free):
            if count > self.num_free:
                return None
            self._release_retained(count - len(free))
        blocks = []
        for _ in range(count):
            block, _ = free.popitem(last=False)
            ref_counts[block] = 1
            if block in cached:
                self.on_reuse(block)
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block, which is held already or free with cached contents."""
        free, ref_counts, cached = self._free, self._ref_counts, self._key_of
        for block in blocks:
            if ref_counts[block] == 0:
                assert block in cached, f"block {block} is free and its contents are not cached"
                if self._retained.pop(block, None) is None:
                    del free[block]
            ref_counts[block] += 1

    def is_shared(self, block: int) -> bool:
        """Whether the block has several holders, so that it must be copied before it is written."""
        return self._ref_counts[block] > 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block. One without holders is free at once, since all its uses share one stream."""
        free, ref_counts, cached = self._free, self._ref_counts, self._key_of
        for block in blocks:
            assert ref_counts[block] > 0, f"block {block} is freed twice"
            ref_counts[block] -= 1
            if ref_counts[block] == 0:
                free[block] = None
                if block not in cached:
                    free.move_to_end(block, last=False)  # allocated before blocks with cached contents

    def states(self, first: int, count: int) -> str:
        """Return a letter for each of up to `count` blocks from `first` on: `.` free, `h` held, `s` held by several;
        with cached contents `c`, `H` and `S`."""
        holders = self._ref_counts[first : first + count]
        cached = bytes(map(self._key_of.__contains__, range(first, first + len(holders))))
        try:
            held = bytes(holders)
        except ValueError:  # one has more than 255
            held = bytes([min(num, 2) for num in holders])
        shared_or_held = held.translate(_HOLDERS)
        both = int.from_bytes(shared_or_held, "little") + int.from_bytes(cached, "little") * len(_HELD)
        return both.to_bytes(len(holders), "little").translate(_LETTERS).decode()

    # --- prefix cache -----------------------------------------------------------------------------------------------

    def cache_block(self, block: int, key: BlockKey) -> None:
        """Enter a held block that is full into the cache. Of several blocks with one key, only the first is found."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            if key in self._watched:
                self.has_cached_watched = True

    def get_cached_block(self, key: BlockKey) -> int | None:
        """Return a block with these contents, held or free."""
        return self._block_of.get(key)

    def key_of(self, block: int) -> BlockKey | None:
        """Return the key under which a block is found; None if its contents are not cached."""
        return self._key_of.get(block)

    def get_cached_prefix(self, group: int, hashes: Iterable[bytes]) -> tuple[list[bytes], list[int]]:
        """Look up one hash after another, up to the first that is not cached. Returns all hashes that were read, and
        the blocks of all but that one."""
        get, read, blocks = self._block_of.get, [], []
        for block_hash in hashes:
            read.append(block_hash)
            block = get((group, block_hash))
            if block is None:
                break
            blocks.append(block)
        return read, blocks

    def next_cached(self, count: int) -> list[tuple[int, BlockKey]]:
        """Return those of the `count` blocks to be allocated next that have cached contents, and their keys."""
        key_of = self._key_of
        return [(block, key_of[block]) for block in islice(self._free, count) if block in key_of]

    def num_free_of(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free."""
        ref_counts = self._ref_counts
        return sum(ref_counts[block] == 0 for block in blocks)

    def watch(self, keys: Iterable[BlockKey]) -> None:
        """Notice when a block with one of these keys enters the cache; earlier keys are forgotten."""
        self._watched, self.has_cached_watched = set(keys), False

    def evict(self, block: int) -> None:
        """Take the block out of the cache, so that its contents are not found any more."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            if self._retained.pop(block, None) is not None:
                self._put_first(block)

    def reset_prefix_cache(self) -> None:
        """Evict all blocks."""
        self._release_retained(len(self._retained))
        self._key_of.clear()
        self._block_of.clear()

    # --- retention --------------------------------------------------------------------------------------------------

    def retain(self, blocks: Sequence[int], until: float) -> None:
        """Set those of a prefix's blocks apart that are free and cached: until that time, which is above 0, they are
        allocated after all others. Of more than `most_retained`, those retained first go back."""
        kept, free = self._retained, self._free
        for block in reversed(blocks[: self.most_retained]):  # the end of a prefix goes back before its beginning
            if block in free and block in self._key_of:
                del free[block]
                kept[block] = until
                heapq.heappush(self._retained_until, (until, block))
        self._release_retained(len(kept) - self.most_retained)
        if len(self._retained_until) > 2 * len(kept) + _MAX_OUTDATED:
            self._retained_until = [(time, block) for block, time in kept.items()]
            heapq.heapify(self._retained_until)

    def release_expired(self, now: float) -> None:
        """Let retained blocks go whose time is over."""
        times = self._retained_until
        while times and times[0][0] <= now:
            until, block = heapq.heappop(times)
            if self._retained.get(block) == until:
                del self._retained[block]
                self._put_first(block)

    def _release_retained(self, count: int) -> None:
        """Let the blocks go that were retained first."""
        for _ in range(count):
            block, _until = self._retained.popitem(last=False)
            self._put_first(block)

    def _put_first(self, block: int) -> None:
        """Let a free block be the next one that is allocated."""
        self._free[block] = None
        self._free.move_to_end(block, last=False)
