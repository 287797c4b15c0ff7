"""Drafts by prompt lookup, for the slots of a table.

The indices lie on the host, which must know all tokens: on a device that runs ahead of it, see `drafts_ahead.py`.
"""

from __future__ import annotations

from quire.config.speculation import Speculation
from quire.messages import Plan, Result
from quire.speculation.ngram_index import NgramIndex
from quire.worker.speculation.step_drafts import StepDrafts

TOKENS_A_STEP = 2048
"""Tokens of prompts that are read in a step, of all slots together: some 2 ms. Meanwhile their sequences have fewer
drafts, and nobody waits."""
_TOKENS_A_GUESS = 256
"""The same of one slot where nobody has asked for drafts."""


class NgramDrafter:
    """An NgramIndex a slot.

    Args:
        speculation: Of method `ngram`.
    """

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._indices: dict[int, NgramIndex] = {}
        self.read = 0

    def begin(self, plan: Plan) -> None:
        for owner in plan.admitted:
            self._indices.pop(owner.slot, None)
            if owner.history:
                asked = self._speculation
                self._indices[owner.slot] = NgramIndex(owner.history, asked.lookup_max, asked.lookup_min)

    def propose(self, plan: Plan, most_read: int) -> StepDrafts:
        proposed: list[list[int]] = [[] for _ in plan.sampled_rows]
        left = TOKENS_A_STEP
        for place, most in enumerate(plan.drafts):
            index = self._indices.get(plan.slots[plan.sampled_rows[place]]) if most else None
            if index is not None:
                left -= index.catch_up(left)
                proposed[place] = index.propose(most)
        self.read = TOKENS_A_STEP - left
        return StepDrafts.of(proposed)

    def record(self, plan: Plan, result: Result) -> None:
        at = 0
        for row, count in zip(plan.sampled_rows, result.counts, strict=True):
            index = self._indices.get(plan.slots[row])
            if index is not None:
                index.append(result.tokens[at : at + count])
            at += count

    def first_guess(self, slot: int) -> list[int] | None:
        index = self._indices.get(slot)
        if index is None:
            return []
        index.catch_up(_TOKENS_A_GUESS)
        return index.propose(1)
