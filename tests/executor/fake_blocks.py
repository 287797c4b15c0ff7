"""Orders of the fake executor: adapters, and blocks that are moved beside the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from quire.foundation.messages.workers import BlocksLoaded, LoadBlocks, Order, OrderDone
from tests.executor.fake_adapters import FakeAdapters


class FakeOrders:
    """Loads blocks some polls after the step is computed that they come behind.

    Args:
        adapters: Does all other orders.
        move: Copies a host block to the device.
        delay: Says for each load how often `done` is asked before it is there; default: once.
    """

    def __init__(
        self, adapters: FakeAdapters, move: Callable[[int, int], None], delay: Callable[[], int] = lambda: 1
    ) -> None:
        self._adapters = adapters
        self._move = move
        self.delay = delay
        self._loads: deque[LoadBlocks] = deque()
        self._left = 0
        self.computed = 0

    def post(self, order: Order) -> None:
        if isinstance(order, LoadBlocks):
            self._loads.append(order)
            self._left = self._left or self.delay()
        else:
            self._adapters.post(order)

    def done(self) -> list[OrderDone]:
        done = self._adapters.done()
        while self._loads and self._loads[0].after <= self.computed:
            self._left -= 1
            if self._left > 0:
                break
            order = self._loads.popleft()
            self._left = self.delay() if self._loads else 0
            for host, block in order.loads:
                self._move(host, block)
            done.append(BlocksLoaded(order.number, ms=1.0))
        return done

    @property
    def filling(self) -> set[int]:
        """Device blocks that the running step must not use."""
        return {block for order in self._loads for _, block in order.loads if order.after < self.computed}

    @property
    def reading(self) -> set[int]:
        """Host blocks that no step may overwrite, unless the order comes behind it."""
        return {host for order in self._loads for host, _ in order.loads if order.after <= self.computed}
