"""Blocks that are moved beside the steps: when, and what is said of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import pytest
import torch

from quire.foundation.messages.workers import (
    BlocksLoaded,
    BlocksSaved,
    DiskBlock,
    LoadBlocks,
    OrderDone,
    ReadBlocks,
    SaveBlocks,
)
from quire.runtime.worker import block_orders
from quire.runtime.worker.block_orders import BlockOrders
from quire.runtime.worker.disk_store import DiskStore, Pieces
from quire.runtime.worker.kv_transfer import CpuBlockTransfer

WAIT_S = 60.0


class Watched(CpuBlockTransfer):
    """Says when it begins to load."""

    def __init__(self) -> None:
        host = torch.arange(2 * 4 * 3, dtype=torch.float32).view(2, 4, 3)
        self.device, self.begun, self.fails = torch.zeros(2, 6, 3), threading.Event(), False
        self.host = host
        super().__init__(self.device, host)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.begun.set()
        if self.fails:
            raise RuntimeError("planted")
        super().load(pairs)


def test_a_load_waits_for_the_plan_before_it() -> None:
    transfer, done = Watched(), queue.SimpleQueue[OrderDone]()
    orders = BlockOrders(transfer, done.put)
    orders.launched(1)
    orders.load(LoadBlocks(1, 1, [(2, 5), (0, 3)]))
    first = done.get(timeout=WAIT_S)
    assert isinstance(first, BlocksLoaded)
    assert (first.number, first.failed) == (1, [])
    assert torch.equal(transfer.device[:, [5, 3]], transfer.host[:, [2, 0]])
    transfer.begun.clear()
    orders.load(LoadBlocks(2, 3, [(1, 1)]))
    orders.launched(2)
    assert not transfer.begun.is_set()
    orders.launched(3)
    assert done.get(timeout=WAIT_S) == BlocksLoaded(2, [], 0.0) or transfer.begun.is_set()
    orders.close()


def test_a_save_waits_for_the_plan_before_it() -> None:
    transfer, done = Watched(), queue.SimpleQueue[OrderDone]()
    orders = BlockOrders(transfer, done.put)
    orders.save(SaveBlocks(1, 2, [(5, 2), (1, 0)]))
    transfer.device[:, [5, 1]] = 7.0  # the plan fills them
    orders.launched(2)
    answer = done.get(timeout=WAIT_S)
    assert isinstance(answer, BlocksSaved)
    assert (answer.number, answer.failed) == (1, [])
    assert torch.equal(transfer.host[:, [2, 0]], torch.full((2, 2, 3), 7.0))
    orders.close()


class HungDisk(DiskStore):
    """A read never ends, until `go` is set."""

    def __init__(self) -> None:
        self.begun, self.go, self.closed = threading.Event(), threading.Event(), False

    def read(self, slot: int, key: tuple[int, bytes], pieces: Pieces) -> bool:
        self.begun.set()
        return self.go.wait(WAIT_S)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("hangs", [True, False])
def test_a_hung_disk_does_not_hold_up_the_end(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_orders, "PATIENCE_S", 0.05 if hangs else WAIT_S)
    disk, done = HungDisk(), queue.SimpleQueue[OrderDone]()
    orders = BlockOrders(Watched(), done.put, disk)
    orders.read(ReadBlocks(1, 0, [DiskBlock(0, 0, b"", 1)]))
    assert disk.begun.wait(WAIT_S)
    if not hangs:
        disk.go.set()
    orders.close()
    assert disk.closed is not hangs
    assert done.empty() is hangs
    disk.go.set()


def test_a_load_that_fails_names_its_blocks() -> None:
    transfer, done = Watched(), queue.SimpleQueue[OrderDone]()
    transfer.fails = True
    orders = BlockOrders(transfer, done.put)
    orders.load(LoadBlocks(1, 0, [(2, 5), (0, 3)]))
    answer = done.get(timeout=WAIT_S)
    assert isinstance(answer, BlocksLoaded)
    assert answer.failed == [5, 3]
    orders.close()


def test_it_ends_while_a_load_waits() -> None:
    transfer, done = Watched(), queue.SimpleQueue[OrderDone]()
    orders = BlockOrders(transfer, done.put)
    orders.load(LoadBlocks(1, 7, [(2, 5)]))
    orders.close()
    assert done.empty()
    assert not transfer.begun.is_set()
