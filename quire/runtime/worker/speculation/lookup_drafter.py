"""Drafts that are looked up in texts, for the slots of a table.

The indices lie on the host, which must know all tokens: on a device that runs ahead of it, see `drafts_ahead.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.foundation.config.speculation import Speculation
from quire.foundation.messages.workers import Admitted, Plan, Result
from quire.runtime.worker.speculation.step_drafts import StepDrafts
from quire.scheduling.speculation.ngram_index import NgramIndex
from quire.scheduling.speculation.suffix_index import PastOutputs, SuffixIndex

TOKENS_A_STEP = 2048
"""Tokens of prompts that are read in a step, of all slots together: some 2 ms. Meanwhile their sequences have fewer
drafts, and nobody waits."""
_TOKENS_A_GUESS = 256
"""Tokens of one slot's sequence that are read for a guess, where nobody has asked for drafts."""


Index = NgramIndex | SuffixIndex
"""A sequence's tokens, and what may follow them."""


class LookupDrafter:
    """A Drafter that keeps an index of each slot's sequence, and looks up in it what may follow.

    Args:
        new_index: Makes the index of a slot's new owner.
    """

    on_device = False

    def __init__(self, new_index: Callable[[Admitted], Index]) -> None:
        self._new_index = new_index
        self._indices: dict[int, Index] = {}
        self.read = 0

    def begin(self, plan: Plan) -> None:
        for owner in plan.admitted:
            if (before := self._indices.pop(owner.slot, None)) is not None:
                before.close()
            if owner.history:
                self._indices[owner.slot] = self._new_index(owner)

    def follows(self, plan: Plan) -> bool:
        """Always False: indices need all tokens, also those of the step before."""
        return False

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


def ngram_drafter(speculation: Speculation) -> LookupDrafter:
    """A drafter that proposes what followed the last tokens earlier in the same sequence."""
    longest, shortest = speculation.lookup_max, speculation.lookup_min
    return LookupDrafter(lambda owner: NgramIndex(owner.history, longest, shortest))


def suffix_drafter(speculation: Speculation) -> LookupDrafter:
    """A drafter that proposes what followed the last tokens most often, in the same sequence and in other requests'
    outputs."""
    options = speculation.suffix
    past = PastOutputs(options.cached_requests)
    return LookupDrafter(lambda owner: SuffixIndex(owner.history, options, past, owner.cache_salt))
