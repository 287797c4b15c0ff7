"""Decides which plans get drafts, how many, and what they wait for; DraftLengths learns from every step how many pay.

On a CPU a step's drafts are proposed when it begins. On a device that runs ahead, a drafter that looks drafts up needs
all tokens, but the host knows the tokens of a step in flight only from its result. So a plan that gets drafts is
launched after all earlier results are taken, while the engine plans the next one. If the device drafts itself, a plan
may get drafts behind a step with drafts without waiting. A plan without drafts is launched behind the steps in flight,
as without speculation. There the time of a step is measured from one result to the next, so that it includes the wait
and the drafting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quire.compute.attention.metadata import IntArray
from quire.foundation.clock import Clock
from quire.foundation.messages.from_engine import EXPECTED_OUTPUT
from quire.foundation.messages.workers import MaskedDrafts, Plan, Result
from quire.runtime.worker.speculation.draft_lengths import DraftLengths
from quire.runtime.worker.speculation.lookup_drafter import Drafter
from quire.runtime.worker.speculation.step_drafts import StepDrafts

_UNLIMITED = 2**30
"""Maximum tokens to read where reading is not limited."""
_RATE = 0.1
_READS_A_PASS = 16.0
"""Assumed number of tokens that a drafter reads in the time of one forward pass, before it is measured."""
_LONG_READ = 16
"""Minimum number of tokens whose reading is timed separately."""
_LOOKS_A_STEP = 8
"""Maximum rows without drafts that are checked after a step for what would have been proposed; each takes some µs."""
_HITS = 4
"""Drafts are considered again after this many correct guesses in a row, for each row that is checked."""
BoolArray = npt.NDArray[np.bool_]


@dataclass
class _Grant:
    """The drafts that a step may have.

    Attributes:
        drafts: Maximum drafts of each sampled row.
        worth: Maximum tokens of one sequence that the drafter may read to catch up.
        drafting_ms: How long the host took to propose them.
        read: Tokens that the device reads for them within the step.
    """

    drafts: list[int]
    worth: int
    drafting_ms: float = 0.0
    read: int = 0


class AdaptiveDrafter:
    """Asks a Drafter for as many drafts as pay. It must be told when each plan is submitted, launched and done.

    Args:
        waits: Whether a step that asks for drafts has to be waited for, as on a device that runs ahead. If so, steps
            with prompts have no drafts.
        adapts: Whether measurements limit the drafts. Must be False for ranks that compute one model together, because
            they would measure different times.
        barred: Returns which of these slots, [slots], may have no drafts now.
    """

    def __init__(
        self,
        inner: Drafter,
        clock: Clock,
        *,
        waits: bool = False,
        adapts: bool = True,
        barred: Callable[[IntArray], BoolArray] | None = None,
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._waits = waits
        self._adapts = adapts
        self._barred = barred
        self._lengths = DraftLengths(waits, settles=inner.on_device)
        self._outputs = float(EXPECTED_OUTPUT)  # tokens of a sequence, on average
        self._sampled: dict[int, int] = {}  # by slot
        self._reading_ms = 0.0  # of a token that the drafter has to catch up with; 0: not measured
        self._granted: dict[int, _Grant] = {}  # by step, until it is done
        self._launched: deque[tuple[Plan, bool]] = deque()  # and whether the drafter has heard of it
        self._submitted = 0  # the last plan that was
        self._undrafted = 0  # the engine knows that there are none up to this plan
        self._done_at = 0.0
        self._had_next = False  # when the last result was taken, the next plan was there
        self._masked: MaskedDrafts | None = None
        self._looked = 0  # at sequences without drafts
        self._hits = 0  # looks in a row that would have been right
        self._unlearned = 0  # steps since one was learned from

    # --- steps ------------------------------------------------------------------------------------------------------

    def awaits_results(self, plan: Plan) -> bool:
        """Note a plan that was submitted to a device that runs ahead. Returns whether it gets drafts that need all
        earlier results first."""
        self._submitted = plan.step
        return self._grant(plan) and not self._follows(plan)

    def launch(self, plan: Plan) -> StepDrafts | None:
        """Note a plan that is about to be launched, and return its drafts; None if the plan allows none."""
        self._submitted = max(self._submitted, plan.step)
        if not self._waits:
            self._begin(plan)
            if plan.drafts:
                self._grant(plan)
        grant = self._granted.get(plan.step)
        self._launched.append((plan, grant is not None or not self._waits))
        if not plan.drafts:
            if plan.sampled_rows:
                self._lengths.skip()
            return None
        drafts = StepDrafts.of([()] * len(plan.sampled_rows))
        if grant is not None:
            if self._waits:
                assert len(self._launched) == 1 or self._follows(plan), "drafts of a plan whose tokens nobody knows"
                self._begin(plan)
            drafts = self._propose(plan, grant)
        if (tokens := drafts.of_masked(plan)) is not None:
            self._masked = MaskedDrafts(plan.step, tokens)
        return drafts

    def take_masked(self) -> MaskedDrafts | None:
        """Return what was proposed for the masked rows of the last launched plan; None if they may have no drafts."""
        masked, self._masked = self._masked, None
        return masked

    def finish(self, result: Result) -> Result:
        """Learn from the result of the oldest launched plan. The returned result says up to which plan there will be no
        drafts."""
        (plan, begun), ms = self._launched.popleft(), result.device_ms
        if self._waits:
            now = self._clock.now()
            ms = (now - self._done_at) * 1e3 if self._had_next else 0.0
            self._done_at, self._had_next = now, self._submitted > plan.step
        if not begun and (plan.admitted or plan.block_ids):
            self._begin(plan)
        if self._adapts:
            self._learn(plan, result, ms)
        else:
            self._granted.pop(plan.step, None)
            self._inner.record(plan, result)
        if self._submitted < self._undrafted or not (resting := self._lengths.resting):
            return result
        self._undrafted = self._submitted + resting
        return replace(result, undrafted=self._undrafted)

    def _begin(self, plan: Plan) -> None:
        for owner in plan.admitted:
            self._lengths.admit(owner.slot)
            if before := self._sampled.pop(owner.slot, 0):
                self._outputs += _RATE * (before - self._outputs)
        self._inner.begin(plan)

    # --- which drafts -----------------------------------------------------------------------------------------------

    def _grant(self, plan: Plan) -> bool:
        """Decide how many drafts the plan's rows may have; returns whether they may have any."""
        places = [place for place, most in enumerate(plan.drafts) if most]
        slots = [plan.slots[plan.sampled_rows[place]] for place in places]
        most = np.array([plan.drafts[place] for place in places], dtype=np.int64)
        if self._barred is not None and slots:
            most[self._barred(np.array(slots))] = 0
        tokens = sum(plan.counts) - sum(plan.drafts)
        if not most.any() or (self._waits and not tokens == len(plan.slots) == len(plan.sampled_rows)):
            self._lengths.skip()
            return False
        granted, worth = [0] * len(plan.drafts), _UNLIMITED
        if self._adapts:
            choice = self._lengths.choose(tokens, slots, most)
            most, worth = choice.drafts, self._worth(len(places), choice.saved_ms)
        for place, slot, drafts in zip(places, slots, most.tolist(), strict=True):
            granted[place] = drafts
            if not drafts:
                self._lengths.acceptance.fade(slot)
        if not any(granted):
            return False
        self._granted[plan.step] = _Grant(granted, worth)
        return True

    def _follows(self, plan: Plan) -> bool:
        """Whether drafts for this plan, which has a grant, can be proposed while the step before still runs."""
        return self._inner.follows(replace(plan, drafts=self._granted[plan.step].drafts))

    def _propose(self, plan: Plan, grant: _Grant) -> StepDrafts:
        granted = grant.drafts
        if self._barred is not None:  # slots may have owners that were not known then
            barred = self._barred(np.array(plan.slots)[plan.sampled_rows])
            granted = [0 if bar else most for bar, most in zip(barred.tolist(), granted, strict=True)]
        began = self._clock.now()
        found = self._inner.propose(replace(plan, drafts=granted), grant.worth)
        if self._inner.on_device:
            grant.read = self._inner.read
        else:
            grant.drafting_ms = (self._clock.now() - began) * 1e3
            self._learn_drafting(found, grant.drafting_ms)
        for place, count in enumerate(found.counts.tolist()):
            if granted[place]:
                self._lengths.found.learn(plan.slots[plan.sampled_rows[place]], count > 0, 1)
        return found

    def _worth(self, rows: int, saved_ms: float) -> int:
        """Return how many tokens of a sequence are worth reading for the drafts that it is expected to have."""
        reading_ms = self._reading_ms or self._lengths.drafting.of(1, rows) / _READS_A_PASS
        return int(self._outputs * max(0.0, saved_ms) / reading_ms) if reading_ms else _UNLIMITED

    # --- what is learned --------------------------------------------------------------------------------------------

    def _learn(self, plan: Plan, result: Result, ms: float) -> None:
        """Learn from a step's result, and from how long the step took; `ms` is 0 if that is unknown."""
        grant, weight = self._granted.pop(plan.step, None), 1
        if grant is None:
            self._unlearned += 1
            if self._unlearned < self._lengths.pace.learn_every and not self._hits and self._lengths.rests:
                self._inner.record(plan, result)
                return
            weight, self._unlearned = self._unlearned, 0
            self._look_back(plan, result)
        self._inner.record(plan, result)
        for place, (row, count) in enumerate(zip(plan.sampled_rows, result.counts, strict=True)):
            slot = plan.slots[row]
            self._sampled[slot] = self._sampled.get(slot, 0) + count * weight
            if result.drafted and result.drafted[place]:
                self._lengths.learn_accepted(slot, max(0, count - 1), result.drafted[place])
        self._learn_time(plan, result, ms, grant)

    def _learn_time(self, plan: Plan, result: Result, ms: float, grant: _Grant | None) -> None:
        rows = len(plan.slots)
        if not rows or not len(plan.sampled_rows) == rows == sum(plan.counts) - sum(plan.drafts) or ms <= 0:
            return
        tokens = rows + sum(result.drafted)
        if grant is not None and grant.read > _LONG_READ:
            self._learn_reading(grant.read, ms - self._lengths.steps.of(tokens))
            return
        if self._waits and grant is not None:
            ms = max(0.0, ms - grant.drafting_ms)
        self._lengths.learn_step(tokens, ms, asked=grant is not None)

    def _look_back(self, plan: Plan, result: Result) -> None:
        """Check for some rows without drafts whether the token that they sampled would have been proposed."""
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
            self._lengths.found.learn(slot, bool(guess), 1)
            if guess:
                self._lengths.learn_accepted(slot, int(right), 1)
            self._hits = self._hits + 1 if right else 0
            if self._hits == _HITS * min(rows, _LOOKS_A_STEP):
                self._lengths.wake()

    def _learn_drafting(self, found: StepDrafts, ms: float) -> None:
        """Learn how long the host took to propose drafts, or to read unread tokens."""
        passes, rows = int(found.counts.max(initial=0)), int((found.counts > 0).sum())
        read = self._inner.read
        if read <= 2 * rows and passes:
            self._lengths.drafting.learn(passes, rows, ms)
        elif read > _LONG_READ:
            self._learn_reading(read, ms - self._lengths.drafting.of(passes, rows))

    def _learn_reading(self, tokens: int, ms: float) -> None:
        self._reading_ms += (_RATE if self._reading_ms else 1.0) * (max(0.0, ms) / tokens - self._reading_ms)
