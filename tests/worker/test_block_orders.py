"""Blocks that are moved beside the steps: when, and what is said of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch

from quire.foundation.messages.workers import BlocksLoaded, LoadBlocks, OrderDone
from quire.runtime.worker.block_orders import BlockOrders
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
