"""One sequence under its grammar: which tokens may come next or behind its drafts, and when it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.engine.structured_output.messages import Failure, Prepare

if TYPE_CHECKING:  # the compiler is imported with the first grammar
    from llguidance import LLMatcher

Bitmasks = npt.NDArray[np.uint8]
"""[rows, bytes]: token t is bit t % 8 of byte t // 8."""
_LEFT = Failure("The output left its grammar.")
_NO_TOKEN = Failure("No token of the vocabulary continues the grammar. Let it allow other texts.", refused=True)


class Matcher:
    """One sequence under its grammar.

    Args:
        compiled: A matcher of this sequence's own, at the beginning of the grammar. It consumes the sequence's tokens,
            and writes which may come next.
        never: Tokens that the sequence must not sample.
        early: Tokens that the sequence must not sample before `min_tokens`.

    Attributes:
        failure: Why the sequence cannot go on; None if it can.
    """

    def __init__(self, prepared: Prepare, compiled: LLMatcher, never: set[int], early: set[int]) -> None:
        self.compiled = compiled
        self.failure: Failure | None = None
        self._never = np.array(sorted(never), dtype=np.int64)
        self._may_forbid = bool(early or never)
        self._early = np.array(sorted(early | never), dtype=np.int64)
        self._min_tokens = prepared.min_tokens
        self._num_tokens = 0

    def consumed(self, count: int, *, all_of_them: bool) -> None:
        """Record that the output has this many tokens more, and whether the grammar allowed all of them."""
        self._num_tokens += count
        if not all_of_them:
            self.failure = self.failure or _LEFT

    @property
    def writes(self) -> bool:
        """Whether `compiled` is to write which tokens may come next."""
        return self.failure is None and not self.compiled.is_stopped()

    def clear_forbidden(self, mask: Bitmasks, ahead: int = 0) -> None:
        """Forbid the tokens that must not be sampled behind `ahead` tokens more, whatever the grammar says."""
        if self._may_forbid:
            tokens = self._early if self._num_tokens + ahead < self._min_tokens else self._never
            np.bitwise_and.at(mask, tokens >> 3, ~(1 << (tokens & 7)).astype(np.uint8))

    def goes_on(self, any_allowed: bool) -> bool:
        """Whether a token may come, once the mask is written: `any_allowed` says whether it has any. If not, the
        sequence is complete, or `failure` says why it has failed."""
        if self.failure is not None:
            return False
        if not self.compiled.is_stopped():  # in an error it is stopped as well
            if any_allowed:
                return True
            if not self.compiled.is_accepting():
                self.failure = _NO_TOKEN
        elif self.compiled.is_error():
            why = self.compiled.get_error().partition("\n")[0][:200]
            self.failure = Failure(f"The grammar becomes too complex to go on ({why}). Make it smaller.", refused=True)
        return False


class DraftMatcher:
    """Follows a sequence's drafts; the sequence stays where it is, also if its grammar fails behind a draft.

    Args:
        drafts: At least one.
        first: The place of its first mask, which is filled already.

    Attributes:
        place: The place of the mask behind the last draft that was followed.
        count: How many masks the sequence has.
    """

    def __init__(self, matcher: Matcher, drafts: Sequence[int], first: int) -> None:
        self._matcher = matcher
        self._drafts = drafts
        self._first = first
        self.compiled = matcher.compiled.deep_copy()
        self.place = first
        self.count = 1

    def advance(self, masks: Bitmasks) -> bool:
        """Follow one more draft. Returns whether a mask may come behind it."""
        followed = self.place - self._first
        if followed == self.count or followed == len(self._drafts):  # no token may follow the last one, or it is that
            return False
        token = self._drafts[followed]
        if not masks[self.place, token >> 3] >> (token & 7) & 1:
            return False
        self.place += 1
        return self.compiled.consume_token(token) and not self.compiled.is_stopped()

    def take(self, mask: Bitmasks) -> None:
        """Take in the mask at `place`, which counts if it has a token."""
        self._matcher.clear_forbidden(mask, self.place - self._first)
        if not self.compiled.is_error() and mask.any():
            self.count += 1
