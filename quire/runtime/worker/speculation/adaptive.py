"""A drafter that proposes no more than pays; see DraftLengths. It times drafting, and is told how long steps take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quire.compute.attention.metadata import IntArray
from quire.foundation.clock import Clock
from quire.foundation.messages.from_engine import EXPECTED_OUTPUT
from quire.foundation.messages.workers import Plan, Result
from quire.runtime.worker.speculation.draft_lengths import DraftLengths
from quire.runtime.worker.speculation.step_drafts import UNLIMITED, Drafter, StepDrafts

_RATE = 0.1
_READS_A_PASS = 16.0
"""Tokens that a drafter reads in the time of a pass, before that is measured."""
_LONG_READ = 16
"""Tokens from which on reading is timed by itself."""
_LOOKS_A_STEP = 8
"""How many rows without drafts are checked after a step: what would have been proposed for them. Each check takes some
µs."""
_QUIET = 4
"""Where drafts do not pay, only one step in this many is learned from, as long as no guess would have been right."""
_QUIET_AHEAD = 16
"""Takes the place of `_QUIET` on a device that runs ahead of the host: there the host's time may be what a step
takes."""
_HITS = 4
"""After this many guesses in a row that would have been right, for each row that is checked, drafts are considered
again."""
BoolArray = npt.NDArray[np.bool_]


class _Grant(NamedTuple):
    """The drafts that a step may have.

    Attributes:
        drafts: By sampled row.
        worth: Tokens of a sequence that may be read for them.
    """

    drafts: list[int]
    worth: int


class AdaptiveDrafter:
    """Asks a Drafter for no more drafts than pay.

    Args:
        inner: Who proposes.
        clock: Times it.
        waits: Whether a step that asks for drafts has to be waited for. Then `grant` is called when a plan is
            submitted, and steps with prompts have no drafts.
        barred: [slots] → which of them may have none now.
    """

    def __init__(
        self, inner: Drafter, clock: Clock, waits: bool = False, barred: Callable[[IntArray], BoolArray] | None = None
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._waits = waits
        self._barred = barred
        self._lengths = DraftLengths(waits, settles=inner.on_device)
        self._outputs = float(EXPECTED_OUTPUT)  # tokens of a sequence, on average
        self._sampled: dict[int, int] = {}  # by slot
        self._reading_ms = 0.0  # of a token that the drafter has to catch up with; 0: not measured
        self._granted: dict[int, _Grant] = {}  # by step, until it is recorded
        self._drafting_ms = 0.0  # of the last step that has asked
        self._reads: dict[int, int] = {}  # by step, until it is recorded: tokens that it read on the device
        self._undrafted = 0  # the engine knows that there are none up to this plan
        self._looked = 0  # at sequences without drafts
        self._hits = 0  # looks in a row that would have been right
        self._max_quiet = _QUIET_AHEAD if waits else _QUIET
        self._quiet = 0  # steps since one was learned from

    def undrafted(self, submitted: int) -> int:
        """The plan up to which there are surely no drafts, where `submitted` is the last one that was submitted; 0:
        there is none that the engine has not been told of already."""
        if submitted < self._undrafted or not (resting := self._lengths.resting):
            return 0
        self._undrafted = submitted + resting
        return self._undrafted

    def skip(self) -> None:
        """Note a plan that allows no drafts."""
        self._lengths.skip()

    def begin(self, plan: Plan) -> None:
        """Take in a plan's new owners of slots, and its changes of block tables."""
        for owner in plan.admitted:
            self._lengths.acceptance.admit(owner.slot)
            if before := self._sampled.pop(owner.slot, 0):
                self._outputs += _RATE * (before - self._outputs)
        self._inner.begin(plan)

    def grant(self, plan: Plan) -> bool:
        """Decide how many drafts the plan's rows may have; returns whether they may have any. Called once for each
        plan, before `propose` or in place of it."""
        places = [place for place, most in enumerate(plan.drafts) if most]
        slots = [plan.slots[plan.sampled_rows[place]] for place in places]
        most = np.array([plan.drafts[place] for place in places], dtype=np.int64)
        if self._barred is not None and slots:
            most[self._barred(np.array(slots))] = 0
        tokens = sum(plan.counts) - sum(plan.drafts)
        if not most.any() or (self._waits and not tokens == len(plan.slots) == len(plan.sampled_rows)):
            self.skip()
            return False
        choice = self._lengths.choose(tokens, slots, most)
        granted = [0] * len(plan.drafts)
        for place, slot, drafts in zip(places, slots, choice.drafts.tolist(), strict=True):
            granted[place] = drafts
            if not drafts:
                self._lengths.acceptance.rest(slot)
        if not any(granted):
            return False
        self._granted[plan.step] = _Grant(granted, self._worth(len(places), choice.saved_ms))
        return True

    def grants(self, plan: Plan) -> bool:
        """Whether `grant` has decided that the plan may have drafts."""
        return plan.step in self._granted

    def follows(self, plan: Plan) -> bool:
        """Whether drafts for this plan, which has a grant, can be proposed while the step before still runs."""
        return self._inner.follows(replace(plan, drafts=self._granted[plan.step].drafts))

    def propose(self, plan: Plan, max_read: int) -> StepDrafts:
        """Propose drafts for a plan that has begun, no more than it grants; see Drafter."""
        if not self._waits:
            self.grant(plan)
        grant = self._granted.get(plan.step)
        if grant is None:
            return StepDrafts.of([()] * len(plan.drafts))
        granted = grant.drafts
        if self._barred is not None:  # slots may have owners that were not known then
            barred = self._barred(np.array(plan.slots)[plan.sampled_rows])
            granted = [0 if bar else most for bar, most in zip(barred.tolist(), granted, strict=True)]
        began = self._clock.now()
        found = self._inner.propose(replace(plan, drafts=granted), min(max_read, grant.worth))
        if self._inner.on_device:
            self._reads[plan.step] = self._inner.read
        else:
            self._drafting_ms = (self._clock.now() - began) * 1e3
            self._learn_drafting(found, self._drafting_ms)
        for place, count in enumerate(found.counts.tolist()):
            if granted[place]:
                self._lengths.acceptance.learn_found(plan.slots[plan.sampled_rows[place]], count > 0)
        return found

    def record(self, plan: Plan, result: Result, ms: float | None = None) -> None:
        """Learn from a step's result. `ms` is how long the step took, where the device's own time does not say that; 0:
        nobody knows."""
        asked = bool(self._granted) and self._granted.pop(plan.step, None) is not None
        weight = 1
        if not asked:
            self._quiet += 1
            if self._quiet < self._max_quiet and not self._hits and self._lengths.rests:
                self._inner.record(plan, result)
                return
            weight, self._quiet = self._quiet, 0
            self._look_back(plan, result)
        self._inner.record(plan, result)
        read = self._reads.pop(plan.step, 0) if asked else 0
        for place, (row, count) in enumerate(zip(plan.sampled_rows, result.counts, strict=True)):
            slot = plan.slots[row]
            self._sampled[slot] = self._sampled.get(slot, 0) + count * weight
            if result.drafted and result.drafted[place]:
                self._lengths.acceptance.learn(slot, max(0, count - 1), result.drafted[place])
        self._learn_time(plan, result, result.device_ms if ms is None else ms, read, asked=asked)

    def _learn_time(self, plan: Plan, result: Result, ms: float, read: int, *, asked: bool) -> None:
        """Learn from how long a step took. `read` is how many tokens the drafter read on the device meanwhile."""
        rows = len(plan.slots)
        if rows and len(plan.sampled_rows) == rows == sum(plan.counts) - sum(plan.drafts) and ms > 0:
            tokens = rows + sum(result.drafted)
            if read > _LONG_READ:
                self._learn_reading(read, ms - self._lengths.steps.of(tokens))
                return
            if self._waits and asked:
                ms = max(0.0, ms - self._drafting_ms)
            self._lengths.learn_step(tokens, ms, asked=asked)

    def _look_back(self, plan: Plan, result: Result) -> None:
        """Check for some rows without drafts whether the token that they have sampled would have been proposed."""
        rows = len(plan.sampled_rows)
        if len(result.tokens) != rows or len(plan.slots) != rows or result.errors:
            return
        for _ in range(min(rows, _LOOKS_A_STEP)):
            self._looked += 1
            place = self._looked % rows
            slot = plan.slots[plan.sampled_rows[place]]
            if (guess := self._inner.first_guess(slot)) is None:
                return
            right = bool(guess) and guess[0] == result.tokens[place]
            self._lengths.acceptance.learn_found(slot, bool(guess))
            if guess:
                self._lengths.acceptance.learn(slot, int(right), 1)
            self._hits = self._hits + 1 if right else 0
            if self._hits == _HITS * min(rows, _LOOKS_A_STEP):
                self._lengths.wake()

    def _worth(self, rows: int, saved_ms: float) -> int:
        """How many tokens of a sequence may be read for the drafts that it is expected to have."""
        reading_ms = self._reading_ms or self._lengths.drafting.of(1, rows) / _READS_A_PASS
        return int(self._outputs * max(0.0, saved_ms) / reading_ms) if reading_ms else UNLIMITED

    def _learn_drafting(self, found: StepDrafts, ms: float) -> None:
        passes, rows = int(found.counts.max(initial=0)), int((found.counts > 0).sum())
        read = self._inner.read
        if read <= 2 * rows and passes:
            self._lengths.drafting.learn(passes, rows, ms)
        elif read > _LONG_READ:
            self._learn_reading(read, ms - self._lengths.drafting.of(passes, rows))

    def _learn_reading(self, tokens: int, ms: float) -> None:
        self._reading_ms += (_RATE if self._reading_ms else 1.0) * (max(0.0, ms) / tokens - self._reading_ms)
