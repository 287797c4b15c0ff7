"""A drafter that proposes no more than pays; see DraftLengths. It times drafting, and is told how long steps take."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from quire.clock import Clock
from quire.messages import EXPECTED_OUTPUT, Plan, Result
from quire.worker.speculation.draft_lengths import DraftLengths
from quire.worker.speculation.step_drafts import UNLIMITED, Drafter, StepDrafts

_RATE = 0.1
_READS_A_PASS = 16.0
"""Tokens that a drafter reads in the time of a pass, before that is measured."""
_LONG_READ = 16
"""Tokens from which on reading is timed by itself."""


class AdaptiveDrafter:
    """A Drafter around another.

    Args:
        inner: Who proposes.
        clock: Times it.
    """

    def __init__(self, inner: Drafter, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._lengths = DraftLengths()
        self._outputs = float(EXPECTED_OUTPUT)  # tokens of a sequence, on average
        self._sampled: dict[int, int] = {}  # by slot
        self._reading_ms = 0.0  # of a token that the drafter has to catch up with; 0: not measured

    @property
    def read(self) -> int:
        return self._inner.read

    def begin(self, plan: Plan) -> None:
        for owner in plan.admitted:
            self._lengths.acceptance.admit(owner.slot)
            if before := self._sampled.pop(owner.slot, 0):
                self._outputs += _RATE * (before - self._outputs)
        self._inner.begin(plan)

    def propose(self, plan: Plan, most_read: int) -> StepDrafts:
        places = [place for place, most in enumerate(plan.drafts) if most]
        slots = [plan.slots[plan.sampled_rows[place]] for place in places]
        most = np.array([plan.drafts[place] for place in places], dtype=np.int64)
        choice = self._lengths.choose(sum(plan.counts) - sum(plan.drafts), slots, most)
        granted = [0] * len(plan.drafts)
        for place, slot, drafts in zip(places, slots, choice.drafts.tolist(), strict=True):
            granted[place] = drafts
            if not drafts:
                self._lengths.acceptance.rest(slot)
        if not any(granted):
            return StepDrafts.of([()] * len(granted))
        began = self._clock.now()
        found = self._inner.propose(replace(plan, drafts=granted), self._worth(len(places), choice.saved_ms))
        self._learn_drafting(found, (self._clock.now() - began) * 1e3)
        return found

    def record(self, plan: Plan, result: Result) -> None:
        self._inner.record(plan, result)
        for place, (row, count) in enumerate(zip(plan.sampled_rows, result.counts, strict=True)):
            slot = plan.slots[row]
            self._sampled[slot] = self._sampled.get(slot, 0) + count
            if result.drafted and result.drafted[place]:
                self._lengths.acceptance.learn(slot, max(0, count - 1), result.drafted[place])
        rows = len(plan.slots)
        if len(plan.sampled_rows) == rows == sum(plan.counts) - sum(plan.drafts):
            self._lengths.steps.learn(rows + sum(result.drafted), result.device_ms)

    def _worth(self, rows: int, saved_ms: float) -> int:
        """How many tokens of a sequence may be read for the drafts that it is expected to have."""
        reading_ms = self._reading_ms or self._lengths.passes.of(rows) / _READS_A_PASS
        return int(self._outputs * max(0.0, saved_ms) / reading_ms) if reading_ms else UNLIMITED

    def _learn_drafting(self, found: StepDrafts, ms: float) -> None:
        passes, rows = int(found.counts.max(initial=0)), int((found.counts > 0).sum())
        read = self._inner.read
        if read <= 2 * rows and passes:
            self._lengths.passes.learn(rows, ms / passes)
        elif read > _LONG_READ:
            left = max(0.0, ms - passes * self._lengths.passes.of(rows)) / read
            self._reading_ms += (_RATE if self._reading_ms else 1.0) * (left - self._reading_ms)
