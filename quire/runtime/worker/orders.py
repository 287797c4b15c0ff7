"""Work of one worker beside its steps, by kind of order."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import TypeVar, cast

from quire.foundation.messages.workers import Order, OrderDone

O = TypeVar("O", bound=Order)  # noqa: E741


class WorkerOrders:
    """The Orders of one worker. Each kind of order has a runner, which begins the work, and reports its end once, in
    any thread."""

    def __init__(self) -> None:
        self._runners: dict[type, Callable[[Order], None]] = {}
        self._done: queue.SimpleQueue[OrderDone] = queue.SimpleQueue()
        self._report: Callable[[OrderDone], None] = self._done.put

    def serve(self, kind: type[O], runner: Callable[[O], None]) -> None:
        """Let `runner` begin all orders of a kind."""
        self._runners[kind] = cast(Callable[[Order], None], runner)

    def post(self, order: Order) -> None:
        self._runners[type(order)](order)

    def done(self) -> list[OrderDone]:
        done: list[OrderDone] = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def report(self, done: OrderDone) -> None:
        """Say that an order is done."""
        self._report(done)

    def report_to(self, report: Callable[[OrderDone], None]) -> None:
        """Call `report` for each order that is done, in the thread that has done it, in place of `done`.

        Must be called before anything is posted.
        """
        self._report = report
