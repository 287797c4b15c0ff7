"""Drafts for a device that runs ahead of the host: which plans have any, and what they wait for.

A drafter needs all tokens, and the host knows those of a step in flight only when its result is there. So a plan that
gets drafts is launched once all results before it are taken; the engine meanwhile plans the next one. Where the device
drafts, a plan can get some behind a step that had drafts itself, and is launched behind it. A plan that gets none is
launched behind those in flight, as without speculation. What a step really takes is the time from one result to the
next, which has the wait in it, and the drafting: by these the drafter decides whether drafts pay.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from quire.foundation.clock import Clock
from quire.foundation.messages.workers import MaskedDrafts, Plan, Result
from quire.runtime.worker.speculation.adaptive import AdaptiveDrafter
from quire.runtime.worker.speculation.step_drafts import UNLIMITED, StepDrafts


class DraftsAhead:
    """Hears of every plan, when it is submitted, launched and done.

    Args:
        drafter: Decides how many drafts there are, and proposes them.
        clock: Times steps.
    """

    def __init__(self, drafter: AdaptiveDrafter, clock: Clock) -> None:
        self._drafter = drafter
        self._clock = clock
        self._launched: deque[tuple[Plan, bool]] = deque()  # and whether the drafter has heard of it
        self._submitted = 0  # the last plan that was
        self._done_at = 0.0
        self._had_next = False  # when the last result was taken, the next plan was there
        self._masked: MaskedDrafts | None = None

    def awaits_results(self, plan: Plan) -> bool:
        """Take a plan that was submitted; returns whether it gets drafts for which all results before it must be
        taken."""
        self._submitted = plan.step
        return self._drafter.grant(plan) and not self._drafter.follows(plan)

    def launch(self, plan: Plan) -> StepDrafts | None:
        """Take a plan that is about to be launched; returns its drafts, or None where it was planned without."""
        if plan.step > self._submitted:
            self._submitted = plan.step
        if not plan.drafts:
            self._launched.append((plan, False))
            if plan.sampled_rows:
                self._drafter.skip()
            return None
        drafting = self._drafter.grants(plan)
        self._launched.append((plan, drafting))
        if not drafting:
            drafts = StepDrafts.of([()] * len(plan.sampled_rows))
        else:
            assert len(self._launched) == 1 or self._drafter.follows(plan), "drafts of a plan whose tokens nobody knows"
            self._drafter.begin(plan)
            drafts = self._drafter.propose(plan, UNLIMITED)
        if (tokens := drafts.of_masked(plan)) is not None:
            self._masked = MaskedDrafts(plan.step, tokens)
        return drafts

    def take_masked(self) -> MaskedDrafts | None:
        """Take what was proposed for the masked rows of the plan that was launched last, if these may have drafts."""
        masked, self._masked = self._masked, None
        return masked

    def finish(self, result: Result) -> Result:
        """Take the result of the oldest launched plan; returns it with the plan up to which there will be no drafts."""
        plan, begun = self._launched.popleft()
        now = self._clock.now()
        took_ms = (now - self._done_at) * 1e3 if self._had_next else 0.0
        self._done_at, self._had_next = now, self._submitted > plan.step
        if not begun and (plan.admitted or plan.block_ids):
            self._drafter.begin(plan)
        self._drafter.record(plan, result, took_ms)
        undrafted = self._drafter.undrafted(self._submitted)
        return replace(result, undrafted=undrafted) if undrafted else result
