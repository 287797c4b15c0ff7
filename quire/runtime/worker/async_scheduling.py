"""Async scheduling: how many steps may be in flight, and which earlier step a step reads tokens of. Does not import
torch, because executors need it before torch is loaded."""

from __future__ import annotations

from quire.foundation.messages.workers import Plan

MAX_STEPS_IN_FLIGHT = 2
"""Maximum steps that are launched before the oldest one's result is taken: one runs and one waits behind it. Buffers
that steps use in turn are not reused earlier."""


def max_in_flight(stages: int) -> int:
    """Return how many steps may be in flight if the model is divided into pipeline stages: one per stage, and one that
    waits."""
    return MAX_STEPS_IN_FLIGHT + stages - 1


class SampledSteps:
    """Finds the step whose sampled tokens a plan's rows read. This follows from the plans so far, so no message is
    needed; every plan must be passed in order."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # by slot, the step that sampled its last token

    def read_by(self, plan: Plan) -> int:
        """Return the last step that samples a token for the plan's rows; 0 if they read no sampled token. A slot's new
        owner does not read tokens of the previous owner, which may still be in flight."""
        for owner in plan.admitted:
            self._last.pop(owner.slot, None)
        return max((self._last.get(slot, 0) for slot in plan.slots), default=0)

    def sampled_by(self, plan: Plan) -> list[int]:
        """Note that the plan samples tokens, and return the slots of its sampled rows."""
        slots = [plan.slots[row] for row in plan.sampled_rows]
        self._last.update(dict.fromkeys(slots, plan.step))
        return slots
