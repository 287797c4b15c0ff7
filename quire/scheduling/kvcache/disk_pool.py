"""What the prefix cache keeps on disk: which slot of a file holds which block, and which of them goes first.

Knows nothing about files: workers read and write them, and say what has failed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from quire.scheduling.kvcache.block_pool import BlockKey

_TELLING = 16
"""So many blocks of a read tell how quick the disk is."""


class DiskPool:
    """Slots 0 to num_blocks - 1 by the keys of what they hold.

    A slot is entered once it is written. While it is read, it is held, and no other block takes its place. A slot that
    could not be written is not used again: so a disk that is full keeps what it has.

    Args:
        entries: (slot, key) of what is there, the least recently used first.
        load_ms: Milliseconds that a block takes from the disk to the host, as far as is known.
    """

    def __init__(self, num_blocks: int = 0, entries: Iterable[tuple[int, BlockKey]] = (), load_ms: float = 0.0) -> None:
        self.num_blocks = num_blocks
        self.load_ms = load_ms
        self._slot_of: OrderedDict[BlockKey, int] = OrderedDict()  # the least recently used first
        self._key_of: dict[int, BlockKey] = {}
        self._holders: dict[int, int] = {}
        self._dropped: list[int] = []  # their contents are to be erased
        for slot, key in entries:
            if slot < num_blocks and key not in self._slot_of:
                self.enter(slot, key)
        self._free = deque(slot for slot in range(num_blocks) if slot not in self._key_of)

    @property
    def num_cached(self) -> int:
        """Number of blocks that are on disk."""
        return len(self._slot_of)

    def get_cached_block(self, key: BlockKey) -> int | None:
        """Return the slot with these contents."""
        return self._slot_of.get(key)

    def key_of(self, slot: int) -> BlockKey | None:
        """Return the key of what a slot holds; None if nobody may find it."""
        return self._key_of.get(slot)

    def allocate(self) -> int | None:
        """Return a slot to write to: a free one, or else the one that was not used for the longest time. None if all
        are held."""
        if self._free:
            return self._free.popleft()
        key = next((key for key, slot in self._slot_of.items() if slot not in self._holders), None)
        if key is None:
            return None
        slot = self._slot_of.pop(key)
        del self._key_of[slot]
        return slot

    def enter(self, slot: int, key: BlockKey) -> None:
        """Note that a slot that was allocated has been written."""
        self._slot_of[key] = slot
        self._key_of[slot] = key

    def hold(self, slots: Iterable[int]) -> None:
        """Keep slots with contents as they are until `release`. They count as used now."""
        for slot in slots:
            self._holders[slot] = self._holders.get(slot, 0) + 1
            self._slot_of.move_to_end(self._key_of[slot])

    def release(self, slots: Iterable[int]) -> None:
        """Let slots go that were held."""
        for slot in slots:
            self._holders[slot] -= 1
            if not self._holders[slot]:
                del self._holders[slot]
                if slot not in self._key_of:
                    self.discard(slot)

    def discard(self, slot: int) -> None:
        """Give back a slot that nobody may find: its contents are erased."""
        self._free.append(slot)
        self._dropped.append(slot)

    def evict(self, key: BlockKey) -> None:
        """Let nobody find the block with this key any more, if there is one."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            del self._key_of[slot]
            if slot not in self._holders:
                self.discard(slot)

    def reset_prefix_cache(self) -> None:
        """Evict all blocks."""
        for key in list(self._slot_of):
            self.evict(key)

    def take_dropped(self) -> list[int]:
        """Return slots whose contents are to be erased before they are written again."""
        dropped, self._dropped = self._dropped, []
        return dropped

    @property
    def num_dropped(self) -> int:
        """Number of slots that are to be erased."""
        return len(self._dropped)

    def learn(self, ms: float, blocks: int) -> None:
        """Take in how long so many blocks took to come together. Few of them tell little: one pause of the disk weighs
        most in their time."""
        self.load_ms += 0.3 * min(1.0, blocks / _TELLING) * (ms / blocks - self.load_ms)

    def was_too_slow(self) -> None:
        """Note that a load was not worth it. So a disk that was slow once is tried again at some time."""
        self.load_ms *= 0.99
