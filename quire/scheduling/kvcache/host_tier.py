"""The prefix cache's tier in host memory: contents whose place on the device others needed, under the same keys.

A cached block that is allocated again is copied to the host first, in the plan that overwrites it. The device runs a
plan's copies to the host before anything else, and in the order of plans: so a host block is whole for every plan that
may find it. Host blocks that a plan reads or writes are held until it is made, since copies to the host come before
those from there, whichever was planned first. Where the host's memory outlives the engine, blocks are copied by the
plan after the one that fills them, so that little is lost, and their keys enter the index once that plan is known to
be done.

Blocks are loaded beside the steps, by orders to the workers. Blocks of an order are held on both sides until it is
done. Then those on the device enter the cache and are let go, and who has waited for them looks them up again. Knows
nothing about requests but their ids, and nothing about bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.foundation.messages.from_engine import TierLoad
from quire.foundation.messages.workers import BlocksLoaded, LoadBlocks
from quire.scheduling.kvcache.block_pool import BlockKey, BlockPool
from quire.scheduling.kvcache.host_pool import HostPool

Moves = list[tuple[int, int]]
"""Blocks that are copied, (from, to)."""


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
    """

    stored: int = 0
    loaded: int = 0
    left_out: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    too_slow: int = 0
    load_ms: float = 0.0
    failed: int = 0


@dataclass
class _Load:
    """Blocks on their way to the device.

    Attributes:
        waiting: Requests that await them.
        hosts, blocks, keys: Where they come from, where they go, and what they hold.
        prefix: Blocks of the same prefix that are on the device already.
    """

    waiting: list[int]
    hosts: list[int]
    blocks: list[int]
    keys: list[BlockKey]
    prefix: list[int]


class HostTier:
    """Keeps in `host` what blocks of `pool` held when they were allocated again.

    Args:
        load_ms: Milliseconds that loading a block takes.
        block_bytes: Bytes of a block, for metrics.
    """

    def __init__(self, pool: BlockPool, host: HostPool, load_ms: float = 0.0, block_bytes: int = 0) -> None:
        self.host = host
        self._block_bytes = block_bytes
        self.load_ms = load_ms
        self.stats = HostTierStats()
        self._pool = pool
        self._stores: Moves = []
        self._loads: dict[int, _Load] = {}  # by the number of their order
        self._coming: dict[BlockKey, int] = {}  # which of them brings it
        self._last_load = 0
        self._new_loads: list[int] = []  # not ordered yet
        self._orders: list[LoadBlocks] = []
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
        )

    @property
    def num_orders(self) -> int:
        """Number of orders that are not done yet."""
        return len(self._loads)

    @property
    def held(self) -> tuple[list[int], list[int]]:
        """Blocks that orders hold, on the device and on the host, for leak tests."""
        loads = self._loads.values()
        device = [block for load in loads for block in (*load.blocks, *load.prefix)]
        return device, [host for load in loads for host in load.hosts]

    # --- lookups, as those of a BlockPool; host blocks are negative --------------------------------------------------

    def get_cached_block(self, key: BlockKey) -> int | None:
        """Return a block with these contents: on the device, or else ~block on the host."""
        block = self._pool.get_cached_block(key)
        if block is not None:
            return block
        block = self.host.get_cached_block(key)
        return None if block is None else ~block

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

    # --- moves of the plan in the making ----------------------------------------------------------------------------

    def cached(self, blocks: Iterable[tuple[int, BlockKey]]) -> None:
        """Note that device blocks have entered the cache, which the plan in the making may be the first to fill."""
        if self.host.index is not None:
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
        if self.host.index is not None:
            self._store_whole()
        stores = self._stores
        if self._used:
            self.host.free(self._used)
            self._used = []
        self._stores = []
        return stores

    # --- loads, beside the plans ------------------------------------------------------------------------------------

    def begin_load(self, request: int, hosts: Sequence[int], prefix: Sequence[int]) -> None:
        """Begin to load cached contents for a request, which awaits them. As many device blocks must be free beside
        those of `prefix`, which are held meanwhile. What is on its way already is awaited."""
        keys = [self.host.key_of(host) for host in hosts]
        for key in keys:
            if key in self._coming:
                self._loads[self._coming[key]].waiting.append(request)
                return
        self.host.share(hosts)  # blocks that are evicted for them must not take their place
        self._pool.share(prefix)
        blocks = self._pool.allocate(len(hosts))
        assert blocks is not None, "admission has counted its blocks"
        self._last_load += 1
        known = [key for key in keys if key is not None]
        assert len(known) == len(hosts), "contents that nobody knows"
        self._loads[self._last_load] = _Load([request], list(hosts), blocks, known, list(prefix))
        self._coming.update(dict.fromkeys(known, self._last_load))
        self._new_loads.append(self._last_load)

    def order(self, step: int) -> None:
        """Order what was begun while plans up to this step were made: their moves come before the loads."""
        for number in self._new_loads:
            load = self._loads[number]
            self._orders.append(LoadBlocks(number, step, list(zip(load.hosts, load.blocks, strict=True))))
        self._new_loads = []

    def take_orders(self) -> list[LoadBlocks]:
        """Return orders that the workers are to be given, behind the plans that were made."""
        orders, self._orders = self._orders, []
        return orders

    def loaded(self, done: BlocksLoaded) -> list[int]:
        """Let the blocks of an order that is done be found, and return the requests that await them. What was evicted
        from the host meanwhile must not be found any more."""
        load, failed = self._loads.pop(done.number), set(done.failed)
        for host, block, key in zip(load.hosts, load.blocks, load.keys, strict=True):
            del self._coming[key]
            if block not in failed and self.host.key_of(host) == key:
                self._pool.cache_block(block, key)
        self.stats.loaded += len(load.blocks) - len(failed)
        self.stats.failed += len(failed)
        self.stats.load_ms += done.ms
        self.host.free(load.hosts)
        self._pool.free(reversed(load.blocks))
        self._pool.free(reversed(load.prefix))
        return load.waiting

    # --- what plans have copied -------------------------------------------------------------------------------------

    def planned(self, stores: Moves) -> None:
        """Note what a plan copies to the host."""
        if self.host.index is None:
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
        if self.host.index is None:
            return
        for host, key, write in self._written.popleft():
            if self._writes[host] == write and self.host.key_of(host) == key:
                self.host.index.enter(host, key)

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
