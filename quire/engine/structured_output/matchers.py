"""The grammars of running sequences: which tokens each of them may sample next.

Owns following a sequence's tokens, and when it is complete. Knows nothing about processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from quire.engine.structured_output.matcher_messages import Filled, Prepare, Row, RowState, first_masks

Bitmasks = npt.NDArray[np.uint8]
"""[rows, bytes]: token t is bit t % 8 of byte t // 8."""
MOST_THREADS = 16
_LEFT = "The output left its grammar."
GRAMMAR_LOST = "The grammar of this output was lost. Send the request again."


class Matcher:
    """One sequence under its grammar.

    Args:
        prepared: What the engine said.
        matcher: At the beginning of the grammar; this one's own.
        never: Tokens that it must not sample.
        early: Tokens that it must not sample before `min_tokens`.

    Attributes:
        matcher: See above.
        error: Why the sequence cannot go on; empty if it can.
        refused: Whether the grammar is to blame for that.
    """

    def __init__(self, prepared: Prepare, matcher: LLMatcher, never: set[int], early: set[int]) -> None:
        self.matcher = matcher
        self._never = np.array(sorted(never), dtype=np.int64)
        self._may_forbid = bool(early or never)
        self._early = np.array(sorted(early | never), dtype=np.int64)
        self._min_tokens = prepared.min_tokens
        self._num_tokens = 0
        self.error = ""
        self.refused = False

    def advance(self, count: int) -> None:
        """The output has so many tokens more, which the follower consumes."""
        self._num_tokens += count

    @property
    def follower(self) -> LLMatcher | None:
        """What writes which tokens may come next; None where nothing is to be written."""
        return self.matcher if not self.error and not self.matcher.is_stopped() else None

    def clear_forbidden(self, mask: Bitmasks, ahead: int = 0) -> None:
        """Forbid the tokens that must not be sampled behind `ahead` tokens more, whatever the grammar says."""
        if self._may_forbid:
            tokens = self._early if self._num_tokens + ahead < self._min_tokens else self._never
            np.bitwise_and.at(mask, tokens >> 3, ~(1 << (tokens & 7)).astype(np.uint8))

    def state(self, any_allowed: bool) -> RowState:
        """The state of its row, once the follower has written; `any_allowed`: some token may come."""
        if any_allowed and not self.error and not self.matcher.is_stopped():  # in an error it is stopped as well
            return "masked"
        if self.matcher.is_error() and not self.error:
            why = _first_line(self.matcher.get_error())
            self._refuse(f"The grammar becomes too complex to go on ({why}). Make it smaller.")
        if self.error:
            return "failed"
        if self.matcher.is_stopped():
            return "complete"
        if any_allowed:
            return "masked"
        if self.matcher.is_accepting():
            return "complete"
        self._refuse("No token of the vocabulary continues the grammar. Let it allow other texts.")
        return "failed"

    def _refuse(self, error: str) -> None:
        self.error, self.refused = error, True


class Matchers:
    """The matchers of all sequences by id.

    Args:
        tokenizer: The model's.
        eos_ids: The model's end-of-sequence tokens.
        threads: That work at a time.
    """

    def __init__(self, tokenizer: LLTokenizer, eos_ids: Sequence[int], threads: int) -> None:
        self._eos_ids = set(eos_ids)
        self._guessed_eos = set(tokenizer.eos_tokens) - self._eos_ids
        self._matchers: dict[int, Matcher] = {}
        self._executor = LLExecutor(threads) if threads > 1 else None

    def add(self, prepared: Prepare, pristine: LLMatcher) -> None:
        """A sequence begins. `pristine` is its grammar's matcher, which stays as it is."""
        never = self._guessed_eos | (self._eos_ids if prepared.ignore_eos else set())
        early = self._eos_ids.union(prepared.stop_ids) if prepared.min_tokens else set()
        self._matchers[prepared.id] = Matcher(prepared, pristine.deep_copy(), never, early)

    def forget(self, sequence: int) -> None:
        """A sequence is over, or never began."""
        self._matchers.pop(sequence, None)

    def fill(self, rows: Sequence[Row], masks: Bitmasks) -> Filled:
        """Fill `masks` [places, bytes], each row's in its places; see `first_masks`."""
        matchers, places = [self._matchers.get(row.id) for row in rows], first_masks(rows)
        self._consume(matchers, rows)
        known = [(matcher, place) for matcher, place in zip(matchers, places, strict=True) if matcher is not None]
        self._write([(follower, place) for own, place in known if (follower := own.follower)], masks)
        for own, place in known:
            own.clear_forbidden(masks[place])
        first = masks[places] if any(row.drafts for row in rows) else masks[: len(rows)]
        any_allowed = np.any(first.view(np.uint32), axis=1).tolist()
        states: list[RowState] = []
        errors = {}
        for number, matcher in enumerate(matchers):
            states.append("failed" if matcher is None else matcher.state(any_allowed[number]))
            if states[-1] == "failed":
                errors[number] = GRAMMAR_LOST if matcher is None else matcher.error
        ahead = [
            _Ahead(each, row.drafts, place)
            for each, row, place, state in zip(matchers, rows, places, states, strict=True)
            if row.drafts and each is not None and state == "masked"
        ]
        counts = self._look_ahead(ahead, masks)
        refused = [row for row in errors if (failed := matchers[row]) is not None and failed.refused]
        return Filled(states, errors, [counts.get(place, 1) for place in places] if counts else [], refused)

    def _look_ahead(self, ahead: list[_Ahead], masks: Bitmasks) -> dict[int, int]:
        """Fill the masks behind drafts, those behind all first ones at once, and so on. Returns how many masks each
        sequence has, by its first place."""
        counts = {}
        while ahead := [each for each in ahead if each.advance(masks)]:
            self._write([(each.follower, each.place) for each in ahead], masks)
            for each in ahead:
                if each.has_mask(masks[each.place]):
                    counts[each.first] = each.place - each.first + 1
        return counts

    def _consume(self, matchers: Sequence[Matcher | None], rows: Sequence[Row]) -> None:
        """Tokens that are new since the last time, by several threads: 10 µs each."""
        single: list[Matcher] = []
        followers: list[tuple[LLMatcher, int]] = []
        for matcher, row in zip(matchers, rows, strict=True):
            if matcher is None:
                continue
            matcher.advance(len(row.tokens))
            if len(row.tokens) == 1 and self._executor is not None:
                single.append(matcher)
                followers.append((matcher.matcher, row.tokens[0]))
            elif row.tokens and matcher.matcher.try_consume_tokens(row.tokens) < len(row.tokens):
                matcher.error = matcher.error or _LEFT
        all_consumed = self._executor.consume_token_par(followers) if self._executor and followers else ()
        for matcher, consumed in zip(single, all_consumed, strict=True):
            if not consumed:
                matcher.error = matcher.error or _LEFT

    def _write(self, followers: list[tuple[LLMatcher, int]], masks: Bitmasks) -> None:
        """All masks at once, by several threads: one after another, 64 take longer than a GPU's step leaves."""
        start, size = masks.ctypes.data, masks.shape[1]
        if self._executor is None:
            for follower, place in followers:
                follower.unsafe_compute_mask_ptr(start + place * size, size)
        elif followers:
            self._executor.unsafe_compute_mask_ptr(followers, start, size, len(masks))


def _first_line(message: str) -> str:
    return message.partition("\n")[0][:200]


class _Ahead:
    """Follows a sequence's drafts; the sequence stays where it is, also if its grammar fails behind a draft.

    Args:
        matcher: The sequence.
        drafts: At least one.
        first: The place of its first mask, which is filled.

    Attributes:
        follower: Of the drafts.
        first: See above.
        place: Of the mask behind the last draft that was followed.
    """

    def __init__(self, matcher: Matcher, drafts: Sequence[int], first: int) -> None:
        self._matcher = matcher
        self._drafts = drafts
        self._ended = False
        self.follower = matcher.matcher.deep_copy()
        self.first = self.place = first

    def advance(self, masks: Bitmasks) -> bool:
        """Follow one more draft. Returns whether a mask may come behind it."""
        followed = self.place - self.first
        if self._ended or followed == len(self._drafts):
            return False
        token = self._drafts[followed]
        if not masks[self.place, token >> 3] >> (token & 7) & 1:
            return False
        self.place += 1
        return self.follower.consume_token(token) and not self.follower.is_stopped()

    def has_mask(self, mask: Bitmasks) -> bool:
        """The follower has written. Returns whether a token may come here; if none, nothing is asked for behind it."""
        self._matcher.clear_forbidden(mask, self.place - self.first)
        self._ended = self.follower.is_error() or not mask.any()
        return not self._ended
