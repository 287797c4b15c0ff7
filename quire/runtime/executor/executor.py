"""The seam between engine and workers: plans go in, results come out in the same order.

Knows nothing about requests. How a plan reaches the workers (direct call, shared memory, connections between
machines) is up to the implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.foundation.messages.to_engine import Adapter
from quire.foundation.messages.workers import AdapterLoaded, DeviceLimits, MaskedDrafts, Plan, Result, TokenBitmasks

FaultHook = Callable[[str, int], None]
"""Called with the name of a point (`submit`, `execute`, `collect`) and the step; a test makes it raise or wait."""


def no_faults(point: str, step: int) -> None:
    """The hook of real runs."""


class AdapterLoader(Protocol):
    """Brings adapters to slots of an executor's devices, beside the steps. A worker's is the DeviceAdapterLoader."""

    def load(self, adapter: Adapter, slot: int) -> None:
        """Begin to load an adapter into a slot, from 1, that no plan in flight uses.

        Slot 0 means: only read the files, to see whether they serve and what their digest is. If the adapter has a
        digest, files with another one are refused.
        """

    def loaded(self) -> list[AdapterLoaded]:
        """The adapters that were loaded or refused since the last call."""


class Executor(Protocol):
    """Runs plans in the order they are submitted."""

    @property
    def adapters(self) -> AdapterLoader | None:
        """What loads adapters, in a started executor; None: no adapters are served."""

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
