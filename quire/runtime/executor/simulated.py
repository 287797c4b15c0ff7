"""An executor without a device: each step takes as long as a cost model says, on a clock that only it moves.

It does not keep tokens, only how long each slot is, so a step of 256 rows costs microseconds: for simulating hours of
load, not for finding wrong paging. Every sampled row gains one token, and as many drafts as random numbers accept;
every pooled text a vector of one number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from quire.foundation.messages.workers import DeviceLimits, Plan, Result, TokenBitmasks, Vector
from quire.runtime.executor.executor import NoOrders, Orders
from quire.runtime.worker.async_scheduling import MAX_STEPS_IN_FLIGHT

IntArray = npt.NDArray[np.int64]

StepMilliseconds = Callable[[IntArray, IntArray, int], float]
"""(tokens of each row, tokens before them in each row's context, number of sampled rows) → milliseconds of the step."""

_VECTOR, _NO_VECTOR = Vector(bytes(4), [1]), Vector()
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

    Args:
        accepted: By position, how likely the draft there and all before it are accepted.
        draft_ms: How long a pass of the draft model takes; None: drafts take no time.

    Attributes:
        busy_ms: The milliseconds of all collected steps.
        steps: How many steps were collected.
    """

    max_in_flight = MAX_STEPS_IN_FLIGHT
    orders: Orders = NoOrders()

    def __init__(
        self,
        limits: DeviceLimits,
        slots: int,
        step_ms: StepMilliseconds,
        clock: VirtualClock,
        accepted: Sequence[float] = (),
        draft_ms: StepMilliseconds | None = None,
    ) -> None:
        self._limits = limits
        self._step_ms = step_ms
        self._clock = clock
        self._lengths = np.zeros(slots, np.int64)
        self._accepted = accepted
        self._draft_ms = draft_ms
        self._luck = Random(0)
        self._in_flight: deque[tuple[Plan, float, float, list[int]]] = deque()  # its ms, its end, and what rows gain
        self._delay_ms = 0.0
        self.busy_ms, self.steps = 0.0, 0

    def delay(self, ms: float) -> None:
        """The next step takes so much longer."""
        self._delay_ms += ms

    def start(self) -> DeviceLimits:
        return self._limits

    def submit(self, plan: Plan) -> None:
        assert not plan.masked, "a simulated step has no masks"
        for admitted in plan.admitted:
            self._lengths[admitted.slot] = admitted.length
        slots, counts = np.array(plan.slots, np.int64), np.array(plan.counts, np.int64)
        before = self._lengths[slots]
        self._lengths[slots] = before + counts
        took = self._step_ms(counts, before, len(plan.sampled_rows) + sum(plan.drafts)) + self._delay_ms
        gained = [1] * len(plan.sampled_rows)
        if plan.drafts:
            gained = list(map(self._gained, plan.drafts))
            sampled = slots[plan.sampled_rows]
            self._lengths[sampled] -= np.array(plan.drafts, np.int64) + 1 - np.array(gained, np.int64)
            took += self._drafting_ms(plan.drafts, self._lengths[sampled])
        self._delay_ms = 0.0
        begins = self._in_flight[-1][2] if self._in_flight else self._clock.now()
        self._in_flight.append((plan, took, max(begins, self._clock.now()) + took / 1e3, gained))

    def submit_bitmasks(self, masks: TokenBitmasks) -> None:
        raise AssertionError("a simulated step has no masks")

    def collect(self, timeout: float | None) -> Result | None:
        plan, took, end, gained = self._in_flight.popleft()
        self._clock.advance_to(end)
        self.busy_ms, self.steps = self.busy_ms + took, self.steps + 1
        return Result(
            plan.step,
            gained,
            [TOKEN] * sum(gained),
            device_ms=took,
            ready_host_blocks=self._limits.num_host_blocks,
            vectors=[_VECTOR if row.is_last else _NO_VECTOR for row in plan.pooled_rows],
            drafted=plan.drafts,
        )

    def _gained(self, drafts: int) -> int:
        """Draw how many tokens a row with so many drafts gains."""
        luck = self._luck.random()
        return 1 + sum(luck < rate for rate in self._accepted[:drafts])

    def _drafting_ms(self, drafts: Sequence[int], lengths: IntArray) -> float:
        """Return the milliseconds of the draft model's passes, in which rows have one token each."""
        if self._draft_ms is None:
            return 0.0
        total, wanted = 0.0, np.array(drafts)
        for number in range(max(drafts)):
            rows = lengths[wanted > number]
            total += self._draft_ms(np.ones_like(rows), rows, len(rows))
        return total

    def check(self) -> None:
        """Do nothing: there is no device that could be lost."""

    def close(self) -> None:
        self._in_flight.clear()
