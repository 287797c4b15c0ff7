"""An executor without a device: each step takes as long as a cost model says, on a clock that only it moves.

It does not keep tokens, only how long each slot is, so a step of 256 rows costs microseconds: for simulating hours of
load, not for finding wrong paging. Every sampled row gains one token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quire.foundation.messages.workers import DeviceLimits, Plan, Result, TokenBitmasks
from quire.runtime.executor.executor import AdapterLoader
from quire.runtime.worker.steps_in_flight import MAX_STEPS_IN_FLIGHT

IntArray = npt.NDArray[np.int64]

StepMilliseconds = Callable[[IntArray, IntArray, int], float]
"""(tokens of each row, tokens before them in each row's context, number of sampled rows) → milliseconds of the step."""

TOKEN = 0
"""The token that every row samples."""


class VirtualClock:
    """A clock that only `advance_to` moves."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def advance_to(self, time: float) -> None:
        """Let time pass until then; an earlier time changes nothing."""
        self._now = max(self._now, time)


class SimulatedExecutor:
    """Runs steps one after another on a virtual clock, which `collect` moves to the end of the step. `start` reports
    `limits`, and up to `slots` sequences run at once.

    Attributes:
        busy_ms: The milliseconds of all collected steps.
        steps: How many steps were collected.
    """

    max_in_flight = MAX_STEPS_IN_FLIGHT
    adapters: AdapterLoader | None = None

    def __init__(self, limits: DeviceLimits, slots: int, step_ms: StepMilliseconds, clock: VirtualClock) -> None:
        self._limits = limits
        self._step_ms = step_ms
        self._clock = clock
        self._lengths = np.zeros(slots, np.int64)
        self._in_flight: deque[tuple[Plan, float, float]] = deque()  # with its milliseconds, and when it ends
        self._delay_ms = 0.0
        self.busy_ms, self.steps = 0.0, 0

    def delay(self, ms: float) -> None:
        """The next step takes so much longer."""
        self._delay_ms += ms

    def start(self) -> DeviceLimits:
        return self._limits

    def submit(self, plan: Plan) -> None:
        assert not plan.drafts and not plan.masked, "a simulated step has neither drafts nor masks"
        for admitted in plan.admitted:
            self._lengths[admitted.slot] = admitted.length
        slots, counts = np.array(plan.slots, np.int64), np.array(plan.counts, np.int64)
        before = self._lengths[slots]
        self._lengths[slots] = before + counts
        took = self._step_ms(counts, before, len(plan.sampled_rows)) + self._delay_ms
        self._delay_ms = 0.0
        begins = self._in_flight[-1][2] if self._in_flight else self._clock.now()
        self._in_flight.append((plan, took, max(begins, self._clock.now()) + took / 1e3))

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        raise AssertionError("a simulated step has no masks")

    def collect(self, timeout: float | None) -> Result | None:
        plan, took, end = self._in_flight.popleft()
        self._clock.advance_to(end)
        self.busy_ms, self.steps = self.busy_ms + took, self.steps + 1
        sampled = len(plan.sampled_rows)
        return Result(
            plan.step, [1] * sampled, [TOKEN] * sampled, device_ms=took, ready_host_blocks=self._limits.num_host_blocks
        )

    def check(self) -> None:
        """Do nothing: there is no device that could be lost."""

    def close(self) -> None:
        self._in_flight.clear()
