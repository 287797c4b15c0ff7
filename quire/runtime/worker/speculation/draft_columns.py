"""What a device needs to know of a step's drafts. Knows nothing about how they are verified."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.runtime.worker.speculation.step_drafts import NO_DRAFT, StepDrafts

Column = TypeVar("Column", Tensor, IntArray)


class DraftColumns(NamedTuple, Generic[Column]):
    """A step's drafts; all int64.

    Attributes:
        offsets, next_drafts: [positions], see StepDrafts.
        ends: [sampled rows] where each row's positions end; of a row of padding, where those before it end.
    """

    offsets: Column
    next_drafts: Column
    ends: Column


def draft_columns(drafts: StepDrafts) -> DraftColumns[IntArray]:
    """The columns of a step's drafts."""
    return DraftColumns(drafts.offsets, drafts.next_drafts, drafts.first_positions + drafts.counts + 1)


def padded_columns(drafts: StepDrafts | None, positions: int, rows: int) -> DraftColumns[IntArray]:
    """The columns of a step's drafts, padded to these numbers of positions and sampled rows. Without drafts, all of it
    is padding."""
    offsets, ends = np.zeros(positions, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    next_drafts = np.full(positions, NO_DRAFT, dtype=np.int64)
    if drafts is not None:
        own = draft_columns(drafts)
        offsets[: len(own.offsets)], next_drafts[: len(own.offsets)] = own.offsets, own.next_drafts
        ends[: len(own.ends)], ends[len(own.ends) :] = own.ends, own.ends[-1]
    return DraftColumns(offsets, next_drafts, ends)
