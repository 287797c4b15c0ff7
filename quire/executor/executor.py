"""The seam between engine and workers: plans go in, results come out in the same order.

Knows nothing about requests. How a plan reaches the workers (direct call, shared memory, Ray) is up to the
implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.messages import DeviceLimits, Plan, Result, TokenBitmasks

FaultHook = Callable[[str, int], None]
"""Called with the name of a point (`submit`, `execute`, `collect`) and the step; a test makes it raise or wait."""


def no_faults(point: str, step: int) -> None:
    """The hook of real runs."""


class Executor(Protocol):
    """Runs plans in the order they are submitted."""

    @property
    def max_in_flight(self) -> int:
        """How many submitted plans may be uncollected; with 2, planning overlaps the device's work."""
        ...

    def start(self) -> DeviceLimits:
        """Load the model and allocate memory; returns what only the device can tell.

        Raises:
            SetupError: The model cannot be served; the message is the cause and one action.
        """
        ...

    def submit(self, plan: Plan) -> None:
        """Hand over the next step without waiting for it."""
        ...

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        """Hand over all masks of a submitted plan, before it is collected."""
        ...

    def collect(self, timeout: float | None) -> Result | None:
        """The oldest uncollected plan's result, or None after `timeout` seconds. Raises what the step raised.

        A plan with masked rows has no result before its masks are there.
        """
        ...

    def close(self) -> None:
        """Wait for what is running and free the device."""
        ...
