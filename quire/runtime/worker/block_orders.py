"""Moves blocks beside the steps, in threads of its own, as orders ask for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from quire.foundation.messages.workers import (
    BlocksLoaded,
    BlocksRead,
    BlocksSaved,
    BlocksStored,
    DiskBlock,
    LoadBlocks,
    OrderDone,
    ReadBlocks,
    SaveBlocks,
    StoreBlocks,
)
from quire.runtime.worker.disk_store import READERS, WRITERS, DiskStore
from quire.runtime.worker.kv_transfer import BlockTransfer

_Queue = queue.SimpleQueue[LoadBlocks | ReadBlocks | SaveBlocks | StoreBlocks | None]


class BlockOrders:
    """Loads blocks to the device and saves them on the host while steps go on; reads them from a disk, and stores
    them there.

    Orders of one kind are done one after the other, in a thread of their own: so a slow disk keeps no load waiting.

    Args:
        report: Is told of each order that is done, in the thread that has done it.
        disk: None: no order names it.
    """

    def __init__(
        self, transfer: BlockTransfer, report: Callable[[OrderDone], None], disk: DiskStore | None = None
    ) -> None:
        self._transfer = transfer
        self._report = report
        self._disk = disk
        self._readers = None if disk is None else ThreadPoolExecutor(READERS, "read blocks")
        self._writers = None if disk is None else ThreadPoolExecutor(WRITERS, "write blocks")
        self._launched = 0
        self._closed = False
        self._changed = threading.Condition()
        self._loads, self._saves, self._reads, self._stores = (_Queue() for _ in range(4))
        queues = (self._loads, self._saves) if disk is None else self._queues
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name="move blocks", daemon=True) for each in queues
        ]
        for thread in self._threads:
            thread.start()

    @property
    def _queues(self) -> tuple[_Queue, ...]:
        return self._loads, self._saves, self._reads, self._stores

    def load(self, order: LoadBlocks) -> None:
        """Begin to load blocks, once the plan that the order names is launched."""
        self._loads.put(order)

    def save(self, order: SaveBlocks) -> None:
        """Begin to copy blocks to the host, once the plan that the order names is launched."""
        self._saves.put(order)

    def read(self, order: ReadBlocks) -> None:
        """Begin to read blocks from the disk."""
        self._reads.put(order)

    def store(self, order: StoreBlocks) -> None:
        """Begin to store blocks, which are whole."""
        self._stores.put(order)

    def launched(self, step: int) -> None:
        """Note that the moves of this step's plan, and of all before it, are launched."""
        with self._changed:
            self._launched = step
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads, after the orders that they are at. Others are not done any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join()
        for pool in (self._readers, self._writers):
            if pool is not None:
                pool.shutdown()
        if self._disk is not None:
            self._disk.close()

    def _run(self, orders: _Queue) -> None:
        while (order := orders.get()) is not None and not self._closed:
            done: OrderDone | None
            match order:
                case LoadBlocks():
                    done = self._load(order)
                case SaveBlocks():
                    done = self._save(order)
                case ReadBlocks():
                    done = self._read(order)
                case StoreBlocks():
                    done = self._store(order)
            if done is not None:
                self._report(done)

    def _load(self, order: LoadBlocks) -> BlocksLoaded | None:
        if not self._wait_for(order.after):
            return None
        began, failed = perf_counter(), list[int]()
        try:
            self._transfer.load(order.loads)
        except RuntimeError:  # a device that failed says so in its steps; else the blocks are computed again
            failed = [device for _, device in order.loads]
        return BlocksLoaded(order.number, failed, 1e3 * (perf_counter() - began))

    def _save(self, order: SaveBlocks) -> BlocksSaved | None:
        if not self._wait_for(order.after):
            return None
        began, failed = perf_counter(), list[int]()
        try:
            self._transfer.save(order.saves)
        except RuntimeError:
            failed = [host for _, host in order.saves]
        return BlocksSaved(order.number, failed, 1e3 * (perf_counter() - began))

    def _read(self, order: ReadBlocks) -> BlocksRead | None:
        assert self._readers is not None, "blocks of a disk that is not there"
        if not self._wait_for(order.after):
            return None
        self._transfer.wait_for_host()  # earlier plans may copy to these host blocks, and from there
        began = perf_counter()
        are_there = self._readers.map(self._read_one, order.blocks)
        failed = [block.slot for block, is_there in zip(order.blocks, are_there, strict=True) if not is_there]
        return BlocksRead(order.number, failed, 1e3 * (perf_counter() - began))

    def _wait_for(self, step: int) -> bool:
        """Wait until a plan is launched; False if this was closed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._launched >= step)
            return not self._closed

    def _read_one(self, block: DiskBlock) -> bool:
        assert self._disk is not None
        return self._disk.read(block.slot, (block.group, block.hash), self._transfer.host_memory(block.host))

    def _store(self, order: StoreBlocks) -> BlocksStored:
        assert self._disk is not None and self._writers is not None, "blocks for a disk that is not there"
        began, disk = perf_counter(), self._disk
        for slot in order.dropped:
            disk.erase(slot)
        if order.blocks:
            self._transfer.wait_for_host()

        def write(block: DiskBlock) -> bool:
            return disk.write(block.slot, (block.group, block.hash), self._transfer.host_memory(block.host))

        are_there = self._writers.map(write, order.blocks)
        failed = [block.slot for block, is_there in zip(order.blocks, are_there, strict=True) if not is_there]
        return BlocksStored(order.number, failed, 1e3 * (perf_counter() - began))
