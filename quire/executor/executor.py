"""The seam between engine and workers: plans go in, results come out in the same order.

Knows nothing about requests; how a plan reaches the workers (direct call, shared memory, Ray) is an implementation's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.messages import Masks, Plan, Result, Sizing

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

    def start(self) -> Sizing:
        """Load the model and allocate everything; returns what only the device can tell.

        Raises:
            SetupError: The model cannot be served; the message is the cause and one action.
        """
        ...

    def submit(self, plan: Plan) -> None:
        """Hand over the next step without waiting for it."""
        ...

    def masks(self, masks: Masks) -> None:
        """Hand over the masks of a submitted plan: all of them at once, before it is collected."""
        ...

    def collect(self, timeout: float | None) -> Result | None:
        """The oldest uncollected plan's result, or None after `timeout` seconds. Raises what the step raised.

        A plan with masked rows has no result before its masks came.
        """
        ...

    def close(self) -> None:
        """Wait for what is running and free the device."""
        ...
