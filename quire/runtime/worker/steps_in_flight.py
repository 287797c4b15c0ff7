"""How many steps may be in flight, and what a later one reads of an earlier one. Imports no torch: executors need it
before torch is there.
"""

from __future__ import annotations

from quire.foundation.messages.workers import Plan

MAX_STEPS_IN_FLIGHT = 2
"""Steps that may be launched before the oldest one's result is taken: one runs, the next one waits behind it. Whatever
steps use in turn is not used again before that.
"""


def max_in_flight(stages: int) -> int:
    """How many steps may be in flight in an engine whose model is divided into stages: one in each stage, and one that
    waits."""
    return MAX_STEPS_IN_FLIGHT + stages - 1


class SampledSteps:
    """Of which step a plan's rows read the tokens: it follows from the plans before, so no message asks for them. Told
    of all plans, in their order."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # by slot, the step that sampled its last token

    def read_by(self, plan: Plan) -> int:
        """The last step that samples what the plan's rows read; 0: they read nothing that is sampled. What a slot's
        owner before has sampled, a new owner does not read; it may still be on its way."""
        for owner in plan.admitted:
            self._last.pop(owner.slot, None)
        return max((self._last.get(slot, 0) for slot in plan.slots), default=0)

    def sampled_by(self, plan: Plan) -> list[int]:
        """Note that the plan samples tokens; the slots of its sampled rows."""
        slots = [plan.slots[row] for row in plan.sampled_rows]
        self._last.update(dict.fromkeys(slots, plan.step))
        return slots
