"""The draft tokens of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.reference.drafts import FIRST_NAMED
from quire.foundation.messages.workers import Plan

NO_DRAFT = -1
"""Stands for a missing draft after the last draft of a row."""


@dataclass(frozen=True)
class StepDrafts:
    """The drafts of a step.

    Attributes:
        counts: [sampled rows] int64, number of drafts of each row.
        tokens: [sum of counts] int64, row by row. If only the device knows the drafts, these are negative names, which
            the op `look_up_tokens` resolves.
        on_device: Whether only the device knows the drafts.
    """

    counts: IntArray
    tokens: IntArray
    on_device: bool = False

    @classmethod
    def of(cls, proposed: Sequence[Sequence[int]]) -> StepDrafts:
        """Make the drafts of a step from the tokens proposed for each sampled row."""
        counts = np.fromiter(map(len, proposed), dtype=np.int64, count=len(proposed))
        return cls(counts, np.array([token for row in proposed for token in row], dtype=np.int64))

    def __bool__(self) -> bool:
        return bool(len(self.tokens))

    def of_masked(self, plan: Plan) -> list[list[int]] | None:
        """Return the drafts of each masked row of the plan; None if none of these rows may have drafts."""
        if not plan.masked:
            return None
        places = np.searchsorted(plan.sampled_rows, plan.masked).tolist()
        if not any(plan.drafts[place] for place in places):
            return None
        ends = self.counts.cumsum()
        return [self.tokens[ends[place] - self.counts[place] : ends[place]].tolist() for place in places]

    def up_to(self, rows: IntArray, counts: IntArray) -> StepDrafts:
        """Return a copy in which only the first `counts` drafts of the sampled rows `rows` can be accepted. Positions
        do not change."""
        kept = self.counts.copy()
        kept[rows] = counts
        stays = _places(self.counts) < kept.repeat(self.counts)
        return replace(self, tokens=np.where(stays, self.tokens, NO_DRAFT))

    @cached_property
    def first_positions(self) -> IntArray:
        """The index of each sampled row's first position, [sampled rows]. A row has one position more than drafts."""
        places: IntArray = self.counts.cumsum() - self.counts + np.arange(len(self.counts))
        return places

    @cached_property
    def row_of_position(self) -> IntArray:
        """The sampled row of each position, [positions]."""
        return np.repeat(np.arange(len(self.counts)), self.counts + 1)

    @cached_property
    def offsets(self) -> IntArray:
        """The index of each position in its row, [positions]."""
        places: IntArray = np.arange(len(self.row_of_position)) - self.first_positions[self.row_of_position]
        return places

    @cached_property
    def next_drafts(self) -> IntArray:
        """The draft that follows each position, or NO_DRAFT, [positions]."""
        drafts = np.full(len(self.tokens) + len(self.counts), NO_DRAFT, dtype=np.int64)
        has_next = np.ones(len(drafts), dtype=np.bool_)
        has_next[self.first_positions + self.counts] = False
        drafts[has_next] = self.tokens
        return drafts


NO_DRAFTS = StepDrafts.of(())


@lru_cache(256)
def named_drafts(counts: tuple[int, ...]) -> StepDrafts:
    """Make drafts that only the device knows, this many for each sampled row."""
    numbers = np.array(counts, dtype=np.int64)
    return StepDrafts(numbers, FIRST_NAMED - _places(numbers), on_device=True)


def _places(counts: IntArray) -> IntArray:
    """Return the index of each draft among the drafts of its row, [sum of counts]."""
    places: IntArray = np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)
    return places


class DraftColumns(NamedTuple):
    """A step's drafts as int64 device tensors.

    Attributes:
        offsets, next_drafts: [positions], as in StepDrafts.
        ends: [sampled rows], the end of each row's positions; a row of padding repeats the end before it.
    """

    offsets: Tensor
    next_drafts: Tensor
    ends: Tensor


def draft_columns(drafts: StepDrafts) -> tuple[IntArray, IntArray, IntArray]:
    """Return the columns of DraftColumns on the host."""
    return drafts.offsets, drafts.next_drafts, drafts.first_positions + drafts.counts + 1


def padded_columns(drafts: StepDrafts | None, positions: int, rows: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return the columns of a step's drafts, padded to these numbers of positions and sampled rows. Without drafts, all
    entries are padding."""
    offsets, ends = np.zeros(positions, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    next_drafts = np.full(positions, NO_DRAFT, dtype=np.int64)
    if drafts is not None:
        own = len(drafts.offsets)
        offsets[:own], next_drafts[:own], own_ends = draft_columns(drafts)
        ends[: len(own_ends)], ends[len(own_ends) :] = own_ends, own_ends[-1]
    return offsets, next_drafts, ends
