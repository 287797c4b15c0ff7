"""Orders of the fake executor: adapters, and blocks that are moved beside the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.foundation.messages.workers import (
    BlocksLoaded,
    BlocksRead,
    BlocksSaved,
    BlocksStored,
    DiskBlock,
    DiskContents,
    LoadBlocks,
    Order,
    OrderDone,
    ReadBlocks,
    SaveBlocks,
    StoreBlocks,
)
from tests.executor.fake_adapters import FakeAdapters

Contents = tuple[list[int | None], str]
"""The tokens of a block, and by which adapter they were computed."""


@dataclass
class FakeDisk:
    """Slots that outlive executors, each with a key and contents.

    Attributes:
        num_blocks: How many slots there are.
        full: Whether a write fails now.
        tears: Whether a write is torn now: nobody notices before it is read.
    """

    num_blocks: int
    slots: dict[int, tuple[tuple[int, bytes], Contents | None]] = field(default_factory=dict)
    full: Callable[[], bool] = lambda: False
    tears: Callable[[], bool] = lambda: False

    def contents(self) -> DiskContents:
        """What a worker finds at its start."""
        return DiskContents(self.num_blocks, [(slot, *key) for slot, (key, _) in self.slots.items()])

    def write(self, block: DiskBlock, contents: Contents) -> bool:
        self.slots.pop(block.slot, None)
        if self.full():
            return False
        self.slots[block.slot] = (block.group, block.hash), None if self.tears() else contents
        return True

    def read(self, block: DiskBlock) -> Contents | None:
        key, contents = self.slots.get(block.slot, ((0, b""), None))
        return contents if key == (block.group, block.hash) else None


class FakeOrders:
    """Moves blocks some polls after the step is computed that they come behind.

    Args:
        adapters: Does all other orders.
        read_host, write_host: Read and write a host block.
        move: Copies a host block to the device.
        read_device: Reads a device block.
        delay: Says for each order how often `done` is asked before it is done; default: once.
        disk: None: there is none.
    """

    def __init__(
        self,
        adapters: FakeAdapters,
        read_host: Callable[[int], Contents],
        write_host: Callable[[int, Contents], None],
        move: Callable[[int, int], None],
        read_device: Callable[[int], Contents],
        disk: FakeDisk | None = None,
        delay: Callable[[], int] = lambda: 1,
    ) -> None:
        self._adapters = adapters
        self._read_host = read_host
        self._write_host = write_host
        self._move = move
        self._read_device = read_device
        self._saves: deque[SaveBlocks] = deque()
        self._disk = disk
        self.delay = delay
        self._loads: deque[LoadBlocks | ReadBlocks] = deque()
        self._stores: deque[tuple[StoreBlocks, list[Contents]]] = deque()
        self._left = 0
        self.computed = 0

    def post(self, order: Order) -> None:
        if isinstance(order, LoadBlocks | ReadBlocks):
            self._loads.append(order)
            self._left = self._left or self.delay()
        elif isinstance(order, SaveBlocks):
            self._saves.append(order)
        elif isinstance(order, StoreBlocks):
            self._stores.append((order, [self._read_host(block.host) for block in order.blocks]))
        else:
            self._adapters.post(order)

    def done(self) -> list[OrderDone]:
        done = self._adapters.done()
        if self._stores:
            done.append(self._store(*self._stores.popleft()))
        if self._saves and self._saves[0].after <= self.computed and self.delay() == 1:
            done.append(self._save(self._saves.popleft()))
        while self._loads and (first := self._loads[0]).after <= self.computed:
            self._left -= 1
            if self._left > 0:
                break
            self._loads.popleft()
            done.append(self._read(first) if isinstance(first, ReadBlocks) else self._load(first))
            self._left = self.delay() if self._loads else 0
        return done

    def _store(self, order: StoreBlocks, before: list[Contents]) -> BlocksStored:
        assert self._disk is not None, "there is no disk"
        now = [self._read_host(block.host) for block in order.blocks]
        assert now == before, "a host block is overwritten while it is stored"
        for slot in order.dropped:
            self._disk.slots.pop(slot, None)
        failed = [b.slot for b, held in zip(order.blocks, now, strict=True) if not self._disk.write(b, held)]
        return BlocksStored(order.number, failed, 1.0)

    def _save(self, order: SaveBlocks) -> BlocksSaved:
        """Copy blocks as late as may be: others may have overwritten them."""
        for block, host in order.saves:
            self._write_host(host, self._read_device(block))
        return BlocksSaved(order.number, ms=1.0)

    def _load(self, order: LoadBlocks) -> BlocksLoaded:
        for host, block in order.loads:
            self._move(host, block)
        return BlocksLoaded(order.number, ms=1.0)

    def _read(self, order: ReadBlocks) -> BlocksRead:
        assert self._disk is not None, "there is no disk"
        failed = list[int]()
        for block in order.blocks:
            contents = self._disk.read(block)
            if contents is None:
                failed.append(block.slot)
            else:
                self._write_host(block.host, contents)
        return BlocksRead(order.number, failed, 1.0)

    @property
    def filling(self) -> set[int]:
        """Device blocks that the running step must not use."""
        loads = [order for order in self._loads if isinstance(order, LoadBlocks) and order.after < self.computed]
        return {block for order in loads for _, block in order.loads}

    @property
    def used(self) -> set[int]:
        """Host blocks that no step may overwrite, unless the order comes behind it."""
        hosts = {block.host for order, _ in self._stores for block in order.blocks}
        hosts |= {host for each in self._saves if each.after <= self.computed for _, host in each.saves}
        for order in self._loads:
            if order.after <= self.computed:
                if isinstance(order, LoadBlocks):
                    hosts.update(host for host, _ in order.loads)
                else:
                    hosts.update(block.host for block in order.blocks)
        return hosts
