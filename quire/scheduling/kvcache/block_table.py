"""The block table of one sequence: for each KV group, the blocks its tokens are in.

Owns its blocks: `free` gives every one back. A shared block is copied before it is written. Knows nothing about
requests or plans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from quire.scheduling.kvcache.block_pool import DUMMY_BLOCK, BlockKey, BlockPool
from quire.scheduling.kvcache.cache_groups import CacheGroup
from quire.scheduling.kvcache.host_tier import HostTier, TierLookup

_UNLIMITED = 2**40
"""Tokens that there is room for if no layer caches tokens."""


def state_key(block_hash: bytes) -> BlockKey:
    """Return the key of the state behind the block with this hash, in the pool of states."""
    return 0, block_hash


class TableEntries(NamedTuple):
    """Columns: block `blocks[i]` is entry `indices[i]` of the table of group `groups[i]`."""

    groups: list[int]
    indices: list[int]
    blocks: list[int]

    def add(self, group: int, first: int, blocks: Sequence[int]) -> None:
        """Consecutive entries of one group, from entry `first` on."""
        number = len(blocks)
        self.groups.extend([group] * number)
        self.indices.extend(range(first, first + number))
        self.blocks.extend(blocks)


class Reservation(NamedTuple):
    """What has to happen before new tokens are written.

    Attributes:
        entries: Table entries that are new.
        copies: Blocks that are copied, (from, to).
    """

    entries: TableEntries
    copies: list[tuple[int, int]]


class PrefixMatch(NamedTuple):
    """A sequence's longest prefix in the prefix cache.

    Attributes:
        num_tokens: Length of the prefix, a multiple of the block size.
        blocks: Blocks of the prefix, by group; the dummy where a window does not reach, and ~block for one on the host.
        missing: A longer prefix can match only after a block with one of these keys was cached,
        missing_states: or, in models with states, a checkpoint with one of these.
        state: The checkpoint at the end of the prefix; 0 for an empty prefix, and in models without states.
    """

    num_tokens: int
    blocks: list[list[int]]
    missing: list[BlockKey]
    missing_states: list[BlockKey] = []  # noqa: RUF012  # nobody changes it
    state: int = DUMMY_BLOCK

    @property
    def held_blocks(self) -> list[int]:
        """All blocks of the prefix on the device except dummies, over all groups."""
        return [block for blocks in self.blocks for block in blocks if block > DUMMY_BLOCK]

    @property
    def host_blocks(self) -> list[int]:
        """Places of all blocks of the prefix that are not on the device, over all groups."""
        return [~block for blocks in self.blocks for block in blocks if block < DUMMY_BLOCK]


class BlockTable:
    """Blocks of one sequence in every KV group. Entries outside of a group's window are the dummy block.

    Args:
        pool: Where blocks come from and go back to.
        groups: The window of each KV group; a model may have none.
        states: The pool of states, whose checkpoints a prefix must end at; None in models without states.
        tier: Where contents are kept that leave the pool; None: nowhere.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[CacheGroup],
        states: BlockPool | None = None,
        tier: HostTier | None = None,
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._states = states
        self._tier = tier
        self._blocks: list[list[int]] = [[] for _ in groups]  # by group
        self._num_cached = 0  # entries whose blocks are in the prefix cache

    @property
    def num_blocks(self) -> int:
        """Number of blocks held, over all groups."""
        return sum(map(_num_held, self._blocks))

    @property
    def allocated_tokens(self) -> int:
        """Number of tokens that the blocks have room for."""
        return len(self._blocks[0]) * self._pool.block_size if self._blocks else _UNLIMITED

    def held_blocks(self, start: int, count: int) -> list[int]:
        """Up to `count` of the blocks held, over all groups, from the one at `start` on."""
        found: list[int] = []
        for blocks in self._blocks:
            dummies = 0  # they come first
            if blocks and blocks[0] == DUMMY_BLOCK:
                dummies = bisect_left(blocks, True, key=lambda block: block != DUMMY_BLOCK)
            found += blocks[dummies + start : dummies + start + count - len(found)]
            start = max(0, start - (len(blocks) - dummies))
        return found

    def num_blocks_to_allocate(self, length: int, chunk: int) -> int:
        """Return how many blocks `length` tokens need beyond those held, if a step computes at most `chunk` tokens."""
        size = self._pool.block_size
        needed = sum(group.max_blocks(length, chunk, size) for group in self._groups)
        return max(0, needed - self.num_blocks)

    def reserve(self, start: int, end: int) -> Reservation | None:
        """Allocate blocks for tokens `start` to `end`, so that no other table shares them. None, and nothing is
        allocated, if too few are free."""
        if not self._blocks:
            return Reservation(TableEntries([], [], []), [])
        size = self._pool.block_size
        first, stop, written = len(self._blocks[0]), -(-end // size), start // size
        if stop - first == 1 and written == first and len(self._blocks) == 1:
            # By far the most frequent: a decoding sequence needs its next block.
            allocated = self._pool.allocate(1)
            if allocated is None:
                return None
            self._blocks[0] += allocated
            return Reservation(TableEntries([0], [first], allocated), [])
        shared = self._shared_entries(written, min(first, stop)) if written < first else []
        each = max(0, stop - first)
        allocated = self._pool.allocate(each * len(self._blocks) + len(shared))
        if allocated is None:
            return None
        new, copies = TableEntries([], [], []), []
        for group, entry in shared:
            block, old = allocated.pop(), self._blocks[group][entry]
            copies.append((old, block))
            new.add(group, entry, [block])
            self._blocks[group][entry] = block
            self._pool.free([old])
        for group, blocks in enumerate(self._blocks):
            own = allocated[group * each : (group + 1) * each]
            blocks += own
            new.add(group, first, own)
        return Reservation(new, copies)

    def free_out_of_window(self, position: int) -> None:
        """Free the blocks that tokens from `position` on no longer see."""
        for group, blocks in zip(self._groups, self._blocks, strict=True):
            if group.reach.length is None:
                continue
            unseen = group.reach.first_visible(position) // self._pool.block_size
            for entry in reversed(range(min(len(blocks), unseen))):
                if blocks[entry] == DUMMY_BLOCK:
                    break  # everything before it was freed earlier
                self._pool.free([blocks[entry]])
                blocks[entry] = DUMMY_BLOCK

    def trim(self, length: int) -> None:
        """Free the blocks behind the first `length` tokens."""
        keep = self._pool.blocks_for(length)
        for blocks in self._blocks:
            self._pool.free(block for block in reversed(blocks[keep:]) if block > DUMMY_BLOCK)
            del blocks[keep:]
        self._num_cached = min(self._num_cached, keep)

    def free(self) -> None:
        """Free every block, the last ones first, so that the beginnings stay in the prefix cache for longest."""
        for blocks in self._blocks:
            self._pool.free(block for block in reversed(blocks) if block > DUMMY_BLOCK)
            blocks.clear()
        self._num_cached = 0

    def entries(self) -> TableEntries:
        """Return all entries except those that a window has left."""
        all_entries = TableEntries([], [], [])
        for group, blocks in enumerate(self._blocks):
            first = next((entry for entry, block in enumerate(blocks) if block != DUMMY_BLOCK), len(blocks))
            all_entries.add(group, first, blocks[first:])
        return all_entries

    # --- sharing ----------------------------------------------------------------------------------------------------

    def covers(self, position: int) -> bool:
        """Whether the table still holds all blocks that a token at `position` sees."""
        size = self._pool.block_size
        visible = (
            blocks[group.reach.first_visible(position) // size : self._pool.blocks_for(position + 1)]
            for group, blocks in zip(self._groups, self._blocks, strict=True)
        )
        return all(block > DUMMY_BLOCK for blocks in visible for block in blocks)

    def num_blocks_within(self, length: int) -> int:
        """Number of blocks held for the first `length` tokens, over all groups."""
        count = self._pool.blocks_for(length)
        return sum(_num_held(blocks[:count]) for blocks in self._blocks)

    def fork(self, parent: BlockTable, length: int) -> None:
        """Share the parent's blocks of its first `length` tokens; this table must be empty."""
        assert not any(self._blocks), "only an empty table can fork"
        count = self._pool.blocks_for(length)
        for own, parents in zip(self._blocks, parent._blocks, strict=True):
            own += parents[:count]
            self._pool.share(block for block in own if block != DUMMY_BLOCK)
        self._num_cached = min(parent._num_cached, length // self._pool.block_size)

    def match_prefix(self, hashes: Iterable[bytes], length: int, tier: TierLookup | None = None) -> PrefixMatch:
        """Find the longest prefix that is cached in all groups, on the device or in a tier that is given. A lookup
        holds no block and leaves the LRU order as it is.

        A group with a window needs only the blocks that the next token sees. Where there are states, the prefix ends at
        one of their checkpoints.

        `hashes` are the sequence's, by block, read no further than there may be a hit. At most `length` tokens match.
        """
        pool, size = tier or self._pool, self._pool.block_size
        full = next((number for number, group in enumerate(self._groups) if group.reach.length is None), None)
        of_full = list[int]()
        if full is None:
            read = list(islice(hashes, length // size))
        else:  # no hit goes beyond the first block that is missing in a group without a window
            read, of_full = pool.get_cached_prefix(full, islice(hashes, length // size))
        candidates = read if full is None else read[: len(of_full)]
        found: list[Sequence[int | None]] = [
            of_full if group == full else [pool.get_cached_block((group, block_hash)) for block_hash in candidates]
            for group in range(len(self._groups))
        ]
        states, missing_states = self._find_states(candidates)
        is_whole = len(found) == 1 and full is not None and states is None
        count = len(candidates) if is_whole else self._longest_hit(found, len(candidates), states)
        matched = []
        for group, blocks in zip(self._groups, found, strict=True):
            first = min(count, group.reach.first_visible(count * size) // size)
            hit = [block for block in blocks[first:count] if block is not None]
            assert len(hit) == count - first
            matched.append([DUMMY_BLOCK] * first + hit)
        missing = [] if full is None else [(full, block_hash) for block_hash in read[len(of_full) :]]
        for number, blocks in enumerate(found):
            missing += [(number, candidates[entry]) for entry, block in enumerate(blocks) if block is None]
        if states is None:
            return PrefixMatch(count * size, matched, missing)
        state = states[count - 1] if count else DUMMY_BLOCK
        assert state is not None
        return PrefixMatch(count * size, matched, missing, missing_states, state)

    def share_prefix(self, match: PrefixMatch) -> None:
        """Hold the blocks of a match, all of which are on the device. The table must be empty, and no block allocated
        since the match was made."""
        assert not any(self._blocks), "only an empty table can share a prefix"
        for own, blocks in zip(self._blocks, match.blocks, strict=True):
            own += blocks
            assert not own or min(own) >= DUMMY_BLOCK, "blocks that are not on the device"
            self._pool.share(block for block in own if block > DUMMY_BLOCK)
        self._num_cached = match.num_tokens // self._pool.block_size

    def cache_blocks(self, hashes: Sequence[bytes], length: int) -> None:
        """Put the full blocks among the first `length` tokens into the prefix cache, under their hashes."""
        count = length // self._pool.block_size
        for entry in range(self._num_cached, count):
            for group, blocks in enumerate(self._blocks):
                if blocks[entry] != DUMMY_BLOCK:
                    self._pool.cache_block(blocks[entry], (group, hashes[entry]))
        if self._tier is not None:
            self._tier.cached(
                (blocks[entry], (group, hashes[entry]))
                for entry in range(self._num_cached, count)
                for group, blocks in enumerate(self._blocks)
                if blocks[entry] != DUMMY_BLOCK
            )
        self._num_cached = max(self._num_cached, count)

    def invalidate(self, hashes: Iterable[bytes]) -> None:
        """Take blocks and states with broken contents out of the prefix cache, whoever holds them now."""
        for block_hash in hashes:
            for group in range(len(self._groups)):
                block = self._pool.get_cached_block((group, block_hash))
                if block is not None:
                    self._pool.evict(block)
                if self._tier is not None:
                    self._tier.evict((group, block_hash))
            state = None if self._states is None else self._states.get_cached_block(state_key(block_hash))
            if self._states is not None and state is not None:
                self._states.evict(state)

    # --- swapping ---------------------------------------------------------------------------------------------------

    def swap_out(self, host_blocks: list[int]) -> list[tuple[int, int]]:
        """Free every device block, because its contents move to the host. Returns (device, host) pairs.

        Args:
            host_blocks: As many as `num_blocks`; the table's entries name them until `swap_in`.
        """
        pairs: list[tuple[int, int]] = []
        for blocks in self._blocks:
            for entry, block in enumerate(blocks):
                if block != DUMMY_BLOCK:
                    pairs.append((block, host_blocks[len(pairs)]))
                    blocks[entry] = ~pairs[-1][1]  # a negative number marks a host block
        self._pool.free(device for device, _ in reversed(pairs))
        self._num_cached = 0
        return pairs

    def swap_in(self) -> list[tuple[int, int]] | None:
        """Allocate device blocks for the contents that are on the host. Returns (host, device) pairs; None if too few
        blocks are free."""
        swapped = [(blocks, entry) for blocks in self._blocks for entry, block in enumerate(blocks) if block < 0]
        allocated = self._pool.allocate(len(swapped))
        if allocated is None:
            return None
        pairs: list[tuple[int, int]] = []
        for (blocks, entry), block in zip(swapped, allocated, strict=True):
            pairs.append((~blocks[entry], block))
            blocks[entry] = block
        return pairs

    def drop_unseen_swapped(self, position: int) -> list[int]:
        """Drop the swapped blocks that tokens from `position` on no longer see, and return their host blocks.

        Otherwise they would be freed right after they are swapped in, and another row of the same plan could take them,
        although all swaps in come last on the device.
        """
        hosts = []
        for group, blocks in zip(self._groups, self._blocks, strict=True):
            for entry in range(min(len(blocks), group.reach.first_visible(position) // self._pool.block_size)):
                if blocks[entry] < DUMMY_BLOCK:
                    hosts.append(~blocks[entry])
                    blocks[entry] = DUMMY_BLOCK
        return hosts

    def free_swapped(self) -> list[int]:
        """Empty a swapped table, and return the host blocks that it named."""
        hosts = [~block for blocks in self._blocks for block in blocks if block < 0]
        for blocks in self._blocks:
            blocks.clear()
        return hosts

    # --- below ------------------------------------------------------------------------------------------------------

    def _shared_entries(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return (group, entry) of each entry from `start` to `stop` whose block has several holders."""
        return [
            (group, entry)
            for group, blocks in enumerate(self._blocks)
            for entry in range(start, stop)
            if blocks[entry] != DUMMY_BLOCK and self._pool.is_shared(blocks[entry])
        ]

    def _find_states(self, hashes: Sequence[bytes]) -> tuple[list[int | None] | None, list[BlockKey]]:
        """Return the checkpoint behind each block, None where there is none, and the keys of those; None and no keys in
        models without states."""
        if self._states is None:
            return None, []
        keys = [state_key(block_hash) for block_hash in hashes]
        states = [self._states.get_cached_block(key) for key in keys]
        return states, [key for key, state in zip(keys, states, strict=True) if state is None]

    def _longest_hit(
        self, found: Sequence[Sequence[int | None]], most: int, states: Sequence[int | None] | None = None
    ) -> int:
        """Return the largest number of blocks, at most `most`, of which every group has those that the next token sees,
        and with a state behind the last one."""
        size = self._pool.block_size
        runs = []  # by group: how many consecutive blocks end at each entry
        for blocks in found:
            run, ends = 0, []
            for block in blocks:
                run = run + 1 if block is not None else 0
                ends.append(run)
            runs.append(ends)
        for count in range(most, 0, -1):
            if states is not None and states[count - 1] is None:
                continue
            visible = (count - group.reach.first_visible(count * size) // size for group in self._groups)
            if all(ends[count - 1] >= needed for ends, needed in zip(runs, visible, strict=True)):
                return count
        return 0


def _num_held(blocks: Sequence[int]) -> int:
    """Blocks held in one group. Dummies come before all others, and a table is swapped as a whole or not at all."""
    return len(blocks) if blocks and blocks[0] > DUMMY_BLOCK else sum(block > DUMMY_BLOCK for block in blocks)
