"""The prefix cache's tier in host memory: contents whose place on the device others needed, under the same keys.

A cached block that is allocated again is copied to the host first, in the plan that overwrites it. The device runs a
plan's copies to the host before anything else, and in the order of plans: so a host block is whole for every plan that
may find it. Host blocks that a plan reads or writes are held until it is made, since copies to the host come before
those from there, whichever was planned first. Where the host's memory outlives the engine, blocks are copied by the
plan after the one that fills them, so that little is lost, and their keys enter the index once that plan is known to
be done.

Where the device copies beside its steps, blocks that are to be allocated next are copied ahead of that, by orders to
the workers that hold nothing: what was allocated before such a copy is known to be done is not used, and copied by the
plan that overwrites it.

Blocks are loaded beside the steps, by orders to the workers. Blocks of an order are held on both sides until it is
done. Then those on the device enter the cache and are let go, and who has waited for them looks them up again. Knows
nothing about requests but their ids, and nothing about bytes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.foundation.messages.from_engine import DiskLoad, TierLoad
from quire.foundation.messages.workers import (
    BlocksLoaded,
    BlocksRead,
    BlocksSaved,
    BlocksStored,
    DiskBlock,
    LoadBlocks,
    ReadBlocks,
    SaveBlocks,
    StoreBlocks,
)
from quire.scheduling.kvcache.block_pool import BlockKey, BlockPool
from quire.scheduling.kvcache.disk_pool import DiskPool
from quire.scheduling.kvcache.host_pool import HostPool

Moves = list[tuple[int, int]]
"""Blocks that are copied, (from, to)."""
ON_DISK = 2**40
"""Places from here on are slots of the disk; below are host blocks."""
PATIENCE_S = 2.0
"""So long a request awaits blocks; then it computes what they hold."""
_MOST_WRITES = 16
"""Blocks on their way to the disk at a time: they are held on the host meanwhile."""
_MOST_SAVES = 128
"""Blocks on their way to the host at a time, beside the steps."""
_SCANS = 8
"""So often blocks are looked for that should be saved, while as many are allocated as are kept saved."""
_Order = LoadBlocks | ReadBlocks | SaveBlocks | StoreBlocks


@dataclass
class HostTierStats:
    """Counts since the start.

    Attributes:
        stored, loaded: Blocks that were copied to the host, and from there.
        left_out: Blocks that were not copied to the host, since all of its blocks were held.
        query_tokens: Tokens of admitted requests that the device had not.
        hit_tokens: Of these: loaded.
        too_slow: Prefixes that were not loaded, since computing them was quicker.
        load_ms: Milliseconds that loads have taken.
        failed: Blocks that could not be loaded.
        disk_stored, disk_loaded: Blocks that were written to the disk, and read from there.
        disk_store_ms, disk_load_ms: Milliseconds that this took.
        disk_unread, disk_unwritten: Blocks that could not be read as they were written, and not be written.
        disk_left_out: Blocks that left the host before they were written.
    """

    stored: int = 0
    loaded: int = 0
    left_out: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    too_slow: int = 0
    load_ms: float = 0.0
    failed: int = 0
    disk_stored: int = 0
    disk_loaded: int = 0
    disk_store_ms: float = 0.0
    disk_load_ms: float = 0.0
    disk_unread: int = 0
    disk_unwritten: int = 0
    disk_left_out: int = 0


@dataclass
class _Fetch:
    """Blocks on their way to the device, or from the disk to the host.

    Attributes:
        waiting: Requests that await them.
        sources, targets, keys: Where they come from, where they go, and what they hold.
        prefix: Blocks of the same prefix that are there already, where they go.
        until: How long they are awaited.
    """

    waiting: list[int]
    sources: list[int]
    targets: list[int]
    keys: list[BlockKey]
    prefix: list[int]
    until: float = math.inf


class TierLookup:
    """Looks blocks up as a BlockPool does, on the device and beyond: there a block is ~place."""

    def get_cached_block(self, key: BlockKey) -> int | None:
        """Return a block with these contents: on the device, or else ~place."""
        raise NotImplementedError

    def get_cached_prefix(self, group: int, hashes: Iterable[bytes]) -> tuple[list[bytes], list[int]]:
        """Look up one hash after another, up to the first that is nowhere. Returns all hashes that were read, and the
        blocks of all but that one."""
        read, blocks = list[bytes](), list[int]()
        for block_hash in hashes:
            read.append(block_hash)
            block = self.get_cached_block((group, block_hash))
            if block is None:
                break
            blocks.append(block)
        return read, blocks


class _DiskLookup(TierLookup):
    """Looks on the disk as well."""

    def __init__(self, tier: HostTier, disk: DiskPool) -> None:
        self._tier = tier
        self._disk = disk

    def get_cached_block(self, key: BlockKey) -> int | None:
        block = self._tier.get_cached_block(key)
        if block is None and (slot := self._disk.get_cached_block(key)) is not None:
            return ~(ON_DISK + slot)
        return block


class HostTier(TierLookup):
    """Keeps in `host` what blocks of `pool` held when they were allocated again, and copies of it on a disk.

    Args:
        load_ms: Milliseconds that loading a block takes.
        block_bytes: Bytes of a block, for metrics.
        disk: Blocks that come to the host are written there as well; None: there is none.
        saved_ahead: Of the blocks that are allocated next, so many are kept saved by orders beside the steps; 0: plans
            do all copies to the host.

    Attributes:
        lookups: What to look prefixes up in, from the one that finds most.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: HostPool,
        load_ms: float = 0.0,
        block_bytes: int = 0,
        disk: DiskPool | None = None,
        saved_ahead: int = 0,
    ) -> None:
        self.host = host
        self.disk = disk or DiskPool()
        self.lookups: Sequence[TierLookup] = (self,) if disk is None else (_DiskLookup(self, disk), self)
        self._writes_through = host.index is not None or disk is not None
        found = [] if disk is None else host.cached_blocks()  # by an engine that has died
        self._to_disk: deque[tuple[int, BlockKey]] = deque(found)  # whole on the host, and not written yet
        self._disk_writes: dict[int, list[tuple[int, int, BlockKey]]] = {}  # by order: slot, host block, key
        self._being_written: set[BlockKey] = set()
        self._block_bytes = block_bytes
        self.load_ms = load_ms
        self.stats = HostTierStats()
        self._pool = pool
        self._stores: Moves = []
        self._saved_ahead = saved_ahead
        self._allocated = 0  # blocks with cached contents, since blocks to save were looked for
        self._to_save: deque[tuple[int, BlockKey]] = deque()
        self._saves: dict[int, list[tuple[int, int, BlockKey]]] = {}  # by order: device block, host block, key
        self._being_saved: dict[BlockKey, int] = {}  # by which order, as long as nobody has overwritten them
        self._loads: dict[int, _Fetch] = {}  # by the number of their order
        self._reads: dict[int, _Fetch] = {}  # and these as well
        self._coming: dict[BlockKey, _Fetch] = {}  # which of them brings it
        self._last_order = 0
        self._new: list[int] = []  # not ordered yet
        self._orders: list[_Order] = []
        self._used: list[int] = []  # host blocks that the plan in the making reads or writes
        self._filled: list[tuple[int, BlockKey]] = []  # device blocks that the plan in the making may fill
        self._whole: list[tuple[int, BlockKey]] = []  # and those that earlier plans have filled
        self._written: deque[list[tuple[int, BlockKey, int]]] = deque()  # by plan: host block, key, which of its writes
        self._writes: dict[int, int] = {}  # by host block
        pool.on_reuse = self._store

    def usage(self) -> TierLoad:
        """Return what is kept, and counts since the start."""
        stats = self.stats
        return TierLoad(
            cached_blocks=self.host.num_cached,
            stored_bytes=stats.stored * self._block_bytes,
            loaded_bytes=stats.loaded * self._block_bytes,
            query_tokens=stats.query_tokens,
            hit_tokens=stats.hit_tokens,
            left_out=stats.left_out,
            too_slow=stats.too_slow,
            load_s=stats.load_ms / 1e3,
            failed_loads=stats.failed,
            disk=None if len(self.lookups) == 1 else self._disk_usage(),
        )

    def _disk_usage(self) -> DiskLoad:
        stats, size = self.stats, self._block_bytes
        return DiskLoad(
            blocks=self.disk.num_cached,
            num_blocks=self.disk.num_blocks,
            stored_bytes=stats.disk_stored * size,
            loaded_bytes=stats.disk_loaded * size,
            store_s=stats.disk_store_ms / 1e3,
            load_s=stats.disk_load_ms / 1e3,
            unread=stats.disk_unread,
            unwritten=stats.disk_unwritten,
            left_out=stats.disk_left_out,
        )

    @property
    def num_orders(self) -> int:
        """Number of orders that are not done yet, or not given."""
        given = len(self._loads) + len(self._reads) + len(self._saves) + len(self._disk_writes)
        return given + bool(self._to_save or self._to_disk or self.disk.num_dropped)

    @property
    def held(self) -> tuple[list[int], list[int]]:
        """Blocks that orders hold, on the device and on the host, for leak tests."""
        loads = self._loads.values()
        device = [block for load in loads for block in (*load.targets, *load.prefix)]
        written = [
            host for each in (self._disk_writes, self._saves) for blocks in each.values() for _, host, _ in blocks
        ]
        read = [host for each in self._reads.values() for host in (*each.targets, *each.prefix)]
        return device, [*(host for load in loads for host in load.sources), *read, *written]

    def get_cached_block(self, key: BlockKey) -> int | None:
        block = self._pool.get_cached_block(key)
        if block is not None:
            return block
        block = self.host.get_cached_block(key)
        return None if block is None else ~block

    def evict(self, key: BlockKey) -> None:
        """Let nobody find the contents with this key any more."""
        self._being_saved.pop(key, None)
        self.host.evict(key)
        self.disk.evict(key)

    def reset_prefix_cache(self) -> None:
        """Evict all blocks, on the host and on the disk."""
        self._being_saved.clear()
        self.host.reset_prefix_cache()
        self.disk.reset_prefix_cache()

    # --- moves of the plan in the making ----------------------------------------------------------------------------

    def cached(self, blocks: Iterable[tuple[int, BlockKey]]) -> None:
        """Note that device blocks have entered the cache, which the plan in the making may be the first to fill."""
        if self._writes_through and self._saved_ahead:
            self._to_save += blocks
        elif self._writes_through:
            self._filled += blocks

    def pin(self, blocks: Sequence[int]) -> tuple[list[int], set[int]]:
        """Hold a host block for the contents of each block, of which as many must be free. Returns them, and those that
        the contents are still to be copied to."""
        keys = [self._pool.key_of(block) for block in blocks]
        found = [None if key is None else self.host.get_cached_block(key) for key in keys]
        self.host.share(host for host in found if host is not None)
        new = self.host.allocate(found.count(None))
        self.stats.stored += len(new)
        places, pinned = iter(new), list[int]()
        for key, host in zip(keys, found, strict=True):
            place = next(places) if host is None else host
            if host is None and key is not None:
                self.host.cache_block(place, key)
            pinned.append(place)
        return pinned, set(new)

    def unpin(self, hosts: Iterable[int]) -> None:
        """Let host blocks go that the plan in the making may read."""
        self._used += hosts

    def end_step(self) -> Moves:
        """Return what the plan copies to the host."""
        if self._writes_through:
            self._store_whole()
        stores = self._stores
        if self._used:
            self.host.free(self._used)
            self._used = []
        self._stores = []
        return stores

    # --- moves beside the plans ---------------------------------------------------------------------------------------

    def begin_load(self, request: int, places: Sequence[int], prefix: Sequence[int]) -> None:
        """Begin to bring cached contents for a request, which awaits them: to the device, or first to the host if some
        of them are on the disk. As many device blocks must be free beside those of `prefix`, which are held while they
        are loaded. What is on its way already is awaited."""
        keys = [self._key_at(place) for place in places]
        if (coming := next((self._coming[key] for key in keys if key in self._coming), None)) is not None:
            coming.waiting.append(request)
            return
        self._last_order += 1
        self._new.append(self._last_order)
        if max(places) >= ON_DISK:
            self._begin_read(request, places)
            return
        self.host.share(places)  # what is evicted for them must not take their place
        self._pool.share(prefix)
        blocks = self._pool.allocate(len(places))
        assert blocks is not None, "admission has counted its blocks"
        load = self._loads[self._last_order] = _Fetch([request], list(places), blocks, keys, list(prefix))
        self._coming.update(dict.fromkeys(keys, load))

    def _begin_read(self, request: int, places: Sequence[int]) -> None:
        prefix = [place for place in places if place < ON_DISK]
        slots = [place - ON_DISK for place in places if place >= ON_DISK]
        keys = [self._key_at(place) for place in places if place >= ON_DISK]
        self.host.share(prefix)
        self.disk.hold(slots)
        read = self._reads[self._last_order] = _Fetch([request], slots, self.host.allocate(len(slots)), keys, prefix)
        self._coming.update(dict.fromkeys(keys, read))

    def can_load(self, places: Sequence[int]) -> bool:
        """Whether the host has room for what comes from the disk, beside what it has itself of a prefix."""
        return max(places, default=0) < ON_DISK or len(places) <= self.host.num_free

    def load_ms_of(self, places: Iterable[int]) -> float:
        """Return how long it should take to load blocks."""
        return sum(self.load_ms + (self.disk.load_ms if place >= ON_DISK else 0.0) for place in places)

    def _key_at(self, place: int) -> BlockKey:
        key = self.disk.key_of(place - ON_DISK) if place >= ON_DISK else self.host.key_of(place)
        assert key is not None, "contents that nobody knows"
        return key

    def order(self, step: int, now: float = 0.0) -> None:
        """Order what was begun while plans up to this step were made: their moves come before the loads."""
        for number in self._new:
            if (load := self._loads.get(number)) is not None:
                load.until = now + PATIENCE_S
                self._orders.append(LoadBlocks(number, step, list(zip(load.sources, load.targets, strict=True))))
            else:
                read = self._reads[number]
                read.until = now + PATIENCE_S
                columns = zip(read.sources, read.keys, read.targets, strict=True)
                blocks = [DiskBlock(slot, *key, host) for slot, key, host in columns]
                self._orders.append(ReadBlocks(number, step, blocks))
        self._new = []
        if self._saved_ahead:
            self._order_saves(step)
        if self._to_disk or self.disk.num_dropped:
            self._order_writes()

    def _order_saves(self, step: int) -> None:
        """Order blocks to the host that plans up to this step have filled, as many as may be on their way."""
        if not self._writes_through and self._allocated * _SCANS >= self._saved_ahead:
            self._allocated = 0
            self._to_save = deque(self._pool.next_cached(self._saved_ahead))
        room, blocks = _MOST_SAVES - sum(map(len, self._saves.values())), list[tuple[int, BlockKey]]()
        while self._to_save and len(blocks) < min(room, self.host.num_free):
            block, key = self._to_save.popleft()
            if (
                self._pool.key_of(block) == key
                and key not in self._being_saved
                and self.host.get_cached_block(key) is None
            ):
                blocks.append((block, key))
        if not self.host.num_free:
            self._to_save.clear()
        if blocks:
            self._last_order += 1
            hosts = self.host.allocate(len(blocks))
            self._saves[self._last_order] = [
                (block, host, key) for (block, key), host in zip(blocks, hosts, strict=True)
            ]
            self._being_saved.update(dict.fromkeys((key for _, key in blocks), self._last_order))
            saves = [(block, host) for (block, _), host in zip(blocks, hosts, strict=True)]
            self._orders.append(SaveBlocks(self._last_order, step, saves))

    def _order_writes(self) -> None:
        """Order whole blocks to the disk, as many as may be on their way."""
        dropped, blocks = self.disk.take_dropped(), list[tuple[int, int, BlockKey]]()
        room = min(_MOST_WRITES, max(1, self.host.num_blocks // 4)) - sum(map(len, self._disk_writes.values()))
        while self._to_disk and len(blocks) < room:
            host, key = self._to_disk.popleft()
            if key in self._being_written or self.disk.get_cached_block(key) is not None:
                continue
            if self.host.key_of(host) != key:
                self.stats.disk_left_out += 1
                continue
            slot = self.disk.allocate()
            if slot is None:
                self.stats.disk_left_out += 1
                continue
            self.host.share([host])
            self._being_written.add(key)
            blocks.append((slot, host, key))
        if blocks or dropped:
            self._last_order += 1
            self._disk_writes[self._last_order] = blocks
            disk_blocks = [DiskBlock(slot, *key, host) for slot, host, key in blocks]
            self._orders.append(StoreBlocks(self._last_order, disk_blocks, dropped))

    def take_orders(self) -> list[_Order]:
        """Return orders that the workers are to be given, behind the plans that were made."""
        orders, self._orders = self._orders, []
        return orders

    def overdue(self, now: float) -> list[int]:
        """Return requests that need not await their blocks any longer. These may come yet, for others."""
        moves = [*self._loads.values(), *self._reads.values()]
        late = [each for each in moves if each.until <= now]
        requests = [request for each in late for request in each.waiting]
        for each in late:
            each.waiting = []
        return requests

    def loaded(self, done: BlocksLoaded) -> list[int]:
        """Let the blocks of an order that is done be found, and return the requests that await them. What was evicted
        from the host meanwhile must not be found any more."""
        load, failed = self._loads.pop(done.number), set(done.failed)
        for host, block, key in zip(load.sources, load.targets, load.keys, strict=True):
            del self._coming[key]
            if block not in failed and self.host.key_of(host) == key:
                self._pool.cache_block(block, key)
        self.stats.loaded += len(load.targets) - len(failed)
        self.stats.failed += len(failed)
        self.stats.load_ms += done.ms
        self.host.free(load.sources)
        self._pool.free(reversed(load.targets))
        self._pool.free(reversed(load.prefix))
        return load.waiting

    def saved(self, done: BlocksSaved) -> None:
        """Let blocks be found on the host that were copied there, unless they were evicted or allocated again
        meanwhile."""
        failed = set(done.failed)
        for block, host, key in self._saves.pop(done.number):
            if self._being_saved.get(key) == done.number:
                del self._being_saved[key]
                if host not in failed and self._pool.key_of(block) == key and self.host.get_cached_block(key) is None:
                    self.host.cache_block(host, key)
                    self.stats.stored += 1
                    self._is_whole(host, key)
            self.host.free([host])

    def read(self, done: BlocksRead) -> list[int]:
        """Let blocks that were read from the disk be found on the host, unless they were evicted there meanwhile, and
        return the requests that await them."""
        read, failed, stats = self._reads.pop(done.number), set(done.failed), self.stats
        for slot, host, key in zip(read.sources, read.targets, read.keys, strict=True):
            del self._coming[key]
            if slot in failed:
                self.disk.evict(key)
            elif self.disk.key_of(slot) == key and self.host.get_cached_block(key) is None:
                self.host.cache_block(host, key)
                if self.host.index is not None:
                    self.host.index.enter(host, key)
        self.disk.release(read.sources)
        self.host.free([*read.prefix, *read.targets])
        self.disk.learn(done.ms / len(read.sources))
        stats.disk_unread += len(failed)
        stats.disk_loaded += len(read.sources) - len(failed)
        stats.disk_load_ms += done.ms
        return read.waiting

    def stored(self, done: BlocksStored) -> None:
        """Let blocks be found on the disk that were written there, unless they were evicted meanwhile."""
        failed = set(done.failed)
        for slot, host, key in self._disk_writes.pop(done.number):
            self._being_written.discard(key)
            if slot in failed:
                self.stats.disk_unwritten += 1
            elif self.host.key_of(host) == key:
                self.disk.enter(slot, key)
                self.stats.disk_stored += 1
            else:
                self.disk.discard(slot)
            self.host.free([host])
        self.stats.disk_store_ms += done.ms

    # --- what plans have copied -------------------------------------------------------------------------------------

    def planned(self, stores: Moves) -> None:
        """Note what a plan copies to the host."""
        if not self._writes_through:
            return
        written = []
        for _, host in stores:
            self._writes[host] = self._writes.get(host, 0) + 1
            key = self.host.key_of(host)
            if key is not None:
                written.append((host, key, self._writes[host]))
        self._written.append(written)

    def computed(self) -> None:
        """Note that the oldest plan is done: what it has copied to the host is whole."""
        if not self._writes_through:
            return
        for host, key, write in self._written.popleft():
            if self._writes[host] == write and self.host.key_of(host) == key:
                self._is_whole(host, key)

    def _is_whole(self, host: int, key: BlockKey) -> None:
        if self.host.index is not None:
            self.host.index.enter(host, key)
        if self.disk.num_blocks:
            self._to_disk.append((host, key))

    def _store_whole(self) -> None:
        """Copy blocks that earlier plans have filled, before the device needs their place."""
        for block, key in self._whole:
            if self._pool.key_of(block) == key:
                self._copy(block, key)
        self._whole, self._filled = self._filled, []

    def _store(self, block: int) -> None:
        """Keep the contents of a block that is allocated again."""
        key = self._pool.key_of(block)
        assert key is not None, "nothing is cached"
        self._allocated += 1
        self._being_saved.pop(key, None)
        self._pool.evict(block)
        self._copy(block, key)

    def _copy(self, block: int, key: BlockKey) -> None:
        known = self.host.get_cached_block(key)
        if known is not None:
            self.host.touch(known)
        elif not self.host.num_free:
            self.stats.left_out += 1
        else:
            (host,) = self.host.allocate(1)
            self.host.cache_block(host, key)
            self._used.append(host)
            self._stores.append((block, host))
            self.stats.stored += 1
