"""A Plan's rows as columns: which tokens, at which positions, of which slots.

First on the host, from the plan alone; then on the device, which knows where each slot stands. The device's buffers
live as long as the worker. Knows nothing about models or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention.backend import Rows
from quire.attention.metadata import AttentionMetadata
from quire.kernels.dispatch import kernel
from quire.layers.positions import Positions
from quire.messages import Plan
from quire.worker.graph_shapes import GraphShape
from quire.worker.slot_table import SlotTable

Ints = npt.NDArray[np.int64]
LAST_SAMPLED = -1
"""In the place of a token's id: what its slot drew last, which only the device knows."""


@dataclass(frozen=True)
class HostBatch:
    """One step's rows, as the host knows them; all int64.

    Attributes:
        slots, counts, bounds: [rows]; see Rows. Padding belongs to the dummy slot.
        row_of_token: [tokens].
        offsets: [tokens], each token's place in its row.
        ids: [tokens], or LAST_SAMPLED.
        firsts: [rows], the place among the tokens of each row's first one.
        logits_indices: [reads], the place among the tokens of each read's last position.
        sampled_slots: [reads].
    """

    slots: Ints
    counts: Ints
    bounds: Ints
    row_of_token: Ints
    offsets: Ints
    ids: Ints
    firsts: Ints
    logits_indices: Ints
    sampled_slots: Ints

    @classmethod
    def of(cls, plan: Plan, bounds: Ints) -> HostBatch:
        """The plan's; `bounds` [slots] are the most tokens that each slot has, and move on."""
        slots, counts = np.array(plan.slots, dtype=np.int64), np.array(plan.counts, dtype=np.int64)
        ends = counts.cumsum()
        total, rows = int(ends[-1]), np.arange(len(slots))
        firsts = ends - counts
        row_of_token = rows if total == len(slots) else np.repeat(rows, counts)
        offsets = np.zeros_like(rows) if total == len(slots) else np.arange(total) - firsts[row_of_token]
        reads = np.array(plan.sampled_rows, dtype=np.int64)
        own = bounds[slots]
        bounds[slots] = own + counts
        ids = _ids(plan, row_of_token)
        return cls(slots, counts, own, row_of_token, offsets, ids, firsts, ends[reads] - 1, slots[reads])

    @classmethod
    def of_dummy(cls, dummy: int, counts: Sequence[int]) -> HostBatch:
        """Rows of the dummy slot that move by so many tokens each, and are read."""
        rows = len(counts)
        plan = Plan(0, [], [], [], [], [], [dummy] * rows, list(counts), [], [], list(range(rows)))
        return cls.of(plan, np.zeros(dummy + 1, dtype=np.int64))

    @property
    def is_decode(self) -> bool:
        """Whether every row moves by one token and is read."""
        return len(self.ids) == len(self.slots) == len(self.sampled_slots)

    def padded(self, shape: GraphShape, dummy: int) -> HostBatch:
        """The same with rows, tokens and reads of the dummy slot behind it, as many as make the shape; this fits it.

        One row has all tokens that are too many, but in a step of single tokens, where each is a row.
        """
        rows, tokens, reads = len(self.slots), len(self.ids), len(self.sampled_slots)
        more, rest, unread = shape.rows - rows, shape.tokens - tokens, shape.reads - reads
        if not (more or rest or unread):
            return self
        of_rows, of_tokens, of_reads = (np.zeros(number, dtype=np.int64) for number in (more, rest, unread))
        of_each, offsets = of_rows + 1, of_tokens
        if not shape.is_decode:
            of_each, offsets = of_rows.copy(), np.arange(rest)
            of_each[:1] = rest
        counts = np.concatenate((self.counts, of_each))
        return HostBatch(
            slots=np.concatenate((self.slots, of_rows + dummy)),
            counts=counts,
            bounds=np.concatenate((self.bounds, of_rows)),
            row_of_token=np.concatenate((self.row_of_token, np.repeat(np.arange(rows, shape.rows), of_each))),
            offsets=np.concatenate((self.offsets, offsets)),
            ids=np.concatenate((self.ids, of_tokens)),
            firsts=counts.cumsum() - counts,
            logits_indices=np.concatenate((self.logits_indices, of_reads)),
            sampled_slots=np.concatenate((self.sampled_slots, of_reads + dummy)),
        )

    def columns(self) -> tuple[Ints, ...]:
        """What the device gets, in the order in which `BatchBuffers.begin` takes it."""
        return self.slots, self.ids, self.counts, self.row_of_token, self.offsets


def _ids(plan: Plan, row_of_token: Ints) -> Ints:
    """[tokens] what the plan gives, and LAST_SAMPLED for every other row's."""
    if len(plan.token_rows) == len(plan.slots):
        return np.array(plan.tokens, dtype=np.int64)
    ids = np.full(len(row_of_token), LAST_SAMPLED, dtype=np.int64)
    if plan.token_rows:
        is_given = np.zeros(len(plan.slots), dtype=np.bool_)
        is_given[plan.token_rows] = True
        ids[is_given[row_of_token]] = plan.tokens
    return ids


@dataclass(frozen=True)
class Batch:
    """One step's input on the device.

    Attributes:
        rows: What attention needs.
        positions: What layers need.
        tokens: [tokens] int64.
    """

    rows: Rows
    positions: Positions
    tokens: Tensor


class BatchBuffers:
    """BufferRing a step's columns into its batch, and moves the slots' lengths.

    Args:
        slots: The table that says where each row stands.
        max_rows, max_tokens: The largest step.
        by_length: Whether the model asks how long sequences count as.
    """

    def __init__(self, slots: SlotTable, max_rows: int, max_tokens: int, by_length: bool = False) -> None:
        self._table = slots
        self._by_length = by_length
        self._prepare_inputs = kernel("prepare_inputs", slots.device.type)
        tokens, rows = max(max_rows, max_tokens), max_rows
        self._tokens, self._positions, self._slot_of_token = torch.zeros(
            (3, tokens), dtype=torch.int64, device=slots.device
        ).unbind()
        self._starts = torch.zeros(rows, dtype=torch.int64, device=slots.device)

    def begin(self, host: HostBatch, columns: Sequence[Tensor], attention: AttentionMetadata[Tensor]) -> Batch:
        """The batch of a step whose plan's differences are applied; its slots' lengths move on.

        Args:
            host: The step's rows.
            columns: `host.columns()` on the device.
            attention: The attention backend's metadata, on the device.
        """
        table, rows, total = self._table, len(host.slots), len(host.ids)
        slots, ids, counts, row_of_token, offsets = columns
        starts, positions = self._starts[:rows], self._positions[:total]
        slot_of_token, tokens = self._slot_of_token[:total], self._tokens[:total]
        self._prepare_inputs(
            slots,
            counts,
            row_of_token,
            offsets,
            ids,
            table.length,
            table.last,
            table.dummy,
            starts,
            positions,
            slot_of_token,
            tokens,
        )
        lengths = None
        if self._by_length:  # at least its own length up to the token
            lengths = torch.maximum(table.rope_length.index_select(0, slot_of_token), positions + 1)
        return Batch(
            Rows(
                counts=host.counts,
                row_of_token=host.row_of_token,
                bounds=host.bounds,
                slot_of_token=slot_of_token,
                starts=starts,
                positions=positions,
                slots=slots,
                tables=table.tables,
                metadata=attention,
            ),
            Positions(positions, lengths),
            tokens,
        )
