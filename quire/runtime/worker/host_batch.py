"""A plan's rows as numpy columns on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.compute.attention.metadata import IntArray
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.graph_shapes import GraphShape
from quire.runtime.worker.speculation.step_drafts import StepDrafts

LAST_SAMPLED = -1
"""Stands for the token that the row's slot sampled last, which only the device knows."""
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class HostBatch:
    """One step's rows, in int64 columns. Padding belongs to the dummy slot.

    Attributes:
        slots: [rows].
        counts: [rows], number of tokens of each row.
        max_lengths: [rows], maximum tokens that each row's slot may have before the step.
        row_of_token: [tokens].
        offsets: [tokens], each token's index in its row.
        token_ids: [tokens], token ids or LAST_SAMPLED.
        first_tokens: [rows], index of each row's first token.
        logits_indices: [sampled], token index of each sampled position: the last of its row, and with drafts also the
            tokens before each draft.
        sampled_slots: [sampled], slots of the sampled positions.
        masked: [masked], which of the sampled positions wait for bitmasks.
        is_short: Whether the batch is padded to a short shape, in which attention treats each token as a row.
    """

    slots: IntArray
    counts: IntArray
    max_lengths: IntArray
    row_of_token: IntArray
    offsets: IntArray
    token_ids: IntArray
    first_tokens: IntArray
    logits_indices: IntArray
    sampled_slots: IntArray
    masked: IntArray
    is_short: bool = False

    @classmethod
    def of(cls, plan: Plan, max_lengths: IntArray, drafts: StepDrafts | None = None) -> HostBatch:
        """Make the batch of a plan and its drafts. `max_lengths` [slots] are the maximum tokens of each slot before the
        step."""
        slots, counts = np.array(plan.slots, dtype=np.int64), np.array(plan.counts, dtype=np.int64)
        sampled = np.array(plan.sampled_rows, dtype=np.int64)
        if drafts is not None:
            counts[sampled] += drafts.counts - np.array(plan.drafts, dtype=np.int64)
        ends = counts.cumsum()
        total, rows = int(ends[-1]), np.arange(len(slots))
        first_tokens = ends - counts
        single = total == len(slots)  # a token a row
        row_of_token = rows if single else np.repeat(rows, counts)
        offsets = np.zeros_like(rows) if single else np.arange(total) - first_tokens[row_of_token]
        logits_indices, masked = ends[sampled] - 1, np.searchsorted(sampled, plan.masked) if plan.masked else _NONE
        drafted = None
        if drafts:
            logits_indices = (logits_indices - drafts.counts)[drafts.row_of_position] + drafts.offsets
            drafted = logits_indices[drafts.offsets > 0]  # a draft is read where the position behind it is sampled
            sampled, masked = sampled[drafts.row_of_position], drafts.first_positions[masked]
        token_ids = _token_ids(plan, row_of_token, drafted)
        if drafts:
            token_ids[drafted] = drafts.tokens
        return cls(
            slots=slots,
            counts=counts,
            max_lengths=max_lengths[slots],
            row_of_token=row_of_token,
            offsets=offsets,
            token_ids=token_ids,
            first_tokens=first_tokens,
            logits_indices=logits_indices,
            sampled_slots=slots[sampled],
            masked=masked,
        )

    @classmethod
    def of_dummy(cls, dummy: int, counts: Sequence[int], sampled: int | None = None) -> HostBatch:
        """Make rows of the dummy slot with `counts` tokens each. The first `sampled` rows are sampled, or all if
        None."""
        rows = len(counts)
        sampled_rows = list(range(rows if sampled is None else sampled))
        plan = Plan(step=0, slots=[dummy] * rows, counts=list(counts), sampled_rows=sampled_rows)
        return cls.of(plan, np.zeros(dummy + 1, dtype=np.int64))

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token and is sampled."""
        return not self.is_short and len(self.token_ids) == len(self.slots) == len(self.sampled_slots)

    @property
    def decode_rows(self) -> int:
        return int(np.count_nonzero(self.counts == 1))

    def padded_to(self, shape: GraphShape, dummy: int) -> HostBatch:
        """Pad the batch to a shape that holds it, with rows, tokens and sampled positions of the dummy slot.

        In a decode step each token of padding is a row. In any other step one row has all of them, and further rows
        have none.
        """
        rows, tokens, sampled = len(self.slots), len(self.token_ids), len(self.sampled_slots)
        more_rows, more_tokens, more_sampled = shape.rows - rows, shape.tokens - tokens, shape.sampled - sampled
        if not (more_rows or more_tokens or more_sampled):
            return self
        zeros = np.zeros(max(more_rows, more_tokens, more_sampled), dtype=np.int64)
        of_rows, of_tokens, of_sampled = zeros[:more_rows], zeros[:more_tokens], zeros[:more_sampled]
        more_counts, offsets = of_rows + 1, of_tokens
        if not shape.is_decode:
            more_counts, offsets = of_rows.copy(), np.arange(more_tokens)
            more_counts[:1] = more_tokens
        counts = np.concatenate((self.counts, more_counts))
        return HostBatch(
            slots=np.concatenate((self.slots, of_rows + dummy)),
            counts=counts,
            max_lengths=np.concatenate((self.max_lengths, of_rows)),
            row_of_token=np.concatenate((self.row_of_token, np.repeat(np.arange(rows, shape.rows), more_counts))),
            offsets=np.concatenate((self.offsets, offsets)),
            token_ids=np.concatenate((self.token_ids, of_tokens)),
            first_tokens=counts.cumsum() - counts,
            logits_indices=np.concatenate((self.logits_indices, of_sampled)),
            sampled_slots=np.concatenate((self.sampled_slots, of_sampled + dummy)),
            masked=self.masked,
            is_short=shape.is_short,
        )


def _token_ids(plan: Plan, row_of_token: IntArray, drafted: IntArray | None) -> IntArray:
    """Return token ids [tokens], with LAST_SAMPLED for rows whose tokens the plan does not name and for drafts."""
    if len(plan.tokens) == len(row_of_token):
        return np.array(plan.tokens, dtype=np.int64)
    token_ids = np.full(len(row_of_token), LAST_SAMPLED, dtype=np.int64)
    if plan.token_rows:
        is_named = np.zeros(len(plan.slots), dtype=np.bool_)
        is_named[plan.token_rows] = True
        named = is_named[row_of_token]
        if drafted is not None:
            named[drafted] = False
        token_ids[named] = plan.tokens
    return token_ids
