"""An executor that notes how long each step took in the engine's loop: from the end of the one before, or from when it
was handed over, until its result was there. What the host does meanwhile is hidden, and what it does too late counts.

Knows nothing about requests.
"""

from __future__ import annotations

from collections import deque

from quire.foundation.clock import Clock
from quire.foundation.messages.workers import DeviceLimits, MaskedDrafts, Plan, Result, TokenBitmasks
from quire.planning.costmodel.measured_step_times import TimedStep
from quire.runtime.executor.executor import AdapterLoader, Executor


class StepRecorder:
    """An executor around another.

    Args:
        executor: That computes; not started.
        slots: Most sequences at once.
        clock: For the times.

    Attributes:
        steps: All that were collected.
    """

    def __init__(self, executor: Executor, slots: int, clock: Clock) -> None:
        self._executor, self._clock = executor, clock
        self._lengths = [0] * slots
        self._in_flight: deque[tuple[TimedStep, float]] = deque()  # without its time; when it was handed over
        self._last_end = 0.0
        self.steps: list[TimedStep] = []

    @property
    def adapters(self) -> AdapterLoader | None:
        return self._executor.adapters

    @property
    def max_in_flight(self) -> int:
        return self._executor.max_in_flight

    def start(self) -> DeviceLimits:
        return self._executor.start()

    def submit(self, plan: Plan) -> None:
        for admitted in plan.admitted:
            self._lengths[admitted.slot] = admitted.length
        before = tuple(self._lengths[slot] for slot in plan.slots)
        for slot, count in zip(plan.slots, plan.counts, strict=True):
            self._lengths[slot] += count
        step = TimedStep(tuple(plan.counts), before, len(plan.sampled_rows), 0.0)
        self._in_flight.append((step, self._clock.now()))
        self._executor.submit(plan)

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        self._executor.submit_bitmasks(masks)

    def collect(self, timeout: float | None) -> Result | MaskedDrafts | None:
        result = self._executor.collect(timeout)
        if isinstance(result, Result):
            end, (step, submitted) = self._clock.now(), self._in_flight.popleft()
            ms = 1e3 * (end - max(self._last_end, submitted))
            self._last_end = end
            self.steps.append(TimedStep(step.counts, step.before, step.sampled, ms))
        return result

    def check(self) -> None:
        self._executor.check()

    def close(self) -> None:
        self._executor.close()
