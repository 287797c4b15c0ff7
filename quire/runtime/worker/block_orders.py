"""Moves blocks beside the steps, in a thread of its own, as orders ask for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import perf_counter

from quire.foundation.messages.workers import BlocksLoaded, LoadBlocks, OrderDone
from quire.runtime.worker.kv_transfer import BlockTransfer


class BlockOrders:
    """Loads blocks to the device while steps go on, one order after the other.

    Args:
        report: Is told of each order that is done, in the thread that has done it.
    """

    def __init__(self, transfer: BlockTransfer, report: Callable[[OrderDone], None]) -> None:
        self._transfer = transfer
        self._report = report
        self._queue: queue.SimpleQueue[LoadBlocks | None] = queue.SimpleQueue()
        self._launched = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="load blocks", daemon=True)
        self._thread.start()

    def load(self, order: LoadBlocks) -> None:
        """Begin to load blocks, once the plan that the order names is launched."""
        self._queue.put(order)

    def launched(self, step: int) -> None:
        """Note that the moves of this step's plan, and of all before it, are launched."""
        with self._changed:
            self._launched = step
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, after the order that it is at. Others are not done any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (order := self._queue.get()) is not None:
            with self._changed:
                self._changed.wait_for(lambda after=order.after: self._closed or self._launched >= after)  # type: ignore[misc]
                if self._closed:
                    return
            began, failed = perf_counter(), list[int]()
            try:
                self._transfer.load(order.loads)
            except RuntimeError:  # a device that failed says so in its steps; else the blocks are computed again
                failed = [block for _, block in order.loads]
            self._report(BlocksLoaded(order.number, failed, 1e3 * (perf_counter() - began)))
