"""The seam between engine and workers: plans go in, results come out in the same order.

Knows nothing about requests. How a plan reaches the workers (direct call, shared memory, connections between
machines) is up to the implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.foundation.messages.workers import (
    DeviceLimits,
    MaskedDrafts,
    Order,
    OrderDone,
    Plan,
    Result,
    TokenBitmasks,
)

FaultHook = Callable[[str, int], None]
"""Called with the name of a point (`submit`, `execute`, `collect`) and the step; a test makes it raise or wait."""


def no_faults(point: str, step: int) -> None:
    """The hook of real runs."""


class Orders(Protocol):
    """Work of an executor's workers beside the steps: it is posted, runs in all of them, and is done once."""

    def post(self, order: Order) -> None:
        """Begin this work, without waiting for it. Orders of one kind are done in the order in which they are
        posted."""

    def done(self) -> list[OrderDone]:
        """The answers to orders that were done, or refused, since the last call."""


class NoOrders:
    """The Orders of an executor without workers."""

    def post(self, order: Order) -> None:
        """Refuse: nobody would do it."""
        raise AssertionError("no worker takes orders")

    def done(self) -> list[OrderDone]:
        """Return nothing."""
        return []


class Executor(Protocol):
    """Runs plans in the order they are submitted."""

    @property
    def orders(self) -> Orders:
        """What does work beside the steps, in a started executor."""

    @property
    def max_in_flight(self) -> int:
        """How many submitted plans may be uncollected; with 2, planning overlaps the device's work."""

    def start(self) -> DeviceLimits:
        """Load the model and allocate memory; returns what only the device can tell.

        Raises:
            SetupError: The model cannot be served; the message is the cause and one action.
        """

    def submit(self, plan: Plan) -> None:
        """Hand over the next step without waiting for it."""

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        """Hand over all masks of a submitted plan, before it is collected."""

    def collect(self, timeout: float | None) -> Result | MaskedDrafts | None:
        """The oldest uncollected plan's result, or None after `timeout` seconds. Raises what the step raised.

        A plan with masked rows has no result before its masks are there. If it allows these rows drafts, the proposed
        drafts are collected once, before the result.
        """

    def check(self) -> None:
        """Called now and then while no plan is uncollected; raises if the device is lost."""

    def close(self) -> None:
        """Wait for what is running and free the device."""
