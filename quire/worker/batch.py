"""A Plan's rows as tensors: which tokens, at which positions, of which slots.

The buffers live as long as the worker. Knows nothing about models or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention.backend import Rows
from quire.layers.positions import Positions
from quire.messages import Plan
from quire.worker.slots import SlotTable

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """One step's input.

    Attributes:
        rows: What attention needs.
        positions: What layers need.
        tokens: [tokens] int64.
        firsts: [rows] int64 on the host: the place in `tokens` of each row's first one.
        read_tokens: [reads] int64 on the host: the place in `tokens` of each read's last position.
        read_slots: [reads] int64 on the host.
    """

    rows: Rows
    positions: Positions
    tokens: Tensor
    firsts: Ints
    read_tokens: Ints
    read_slots: Ints


class BatchBuffers:
    """Turns plans into batches and moves the slots' lengths.

    Args:
        slots: The table that says where each row stands.
        max_rows, max_tokens: The largest step.
        by_length: Whether the model asks how long sequences count as.
    """

    def __init__(self, slots: SlotTable, max_rows: int, max_tokens: int, by_length: bool = False) -> None:
        self._table = slots
        self._by_length = by_length
        self._tokens, self._positions = (
            torch.zeros(max_tokens, dtype=torch.int64, device=slots.device) for _ in range(2)
        )
        self._slots, self._starts = (torch.zeros(max_rows, dtype=torch.int64, device=slots.device) for _ in range(2))

    def fill(self, plan: Plan) -> Batch:
        """The batch of a plan whose differences are applied; its slots' lengths move on."""
        table, size = self._table, len(plan.slots)
        host_slots, counts = np.array(plan.slots, dtype=np.int64), np.array(plan.counts, dtype=np.int64)
        ends = counts.cumsum()
        total = int(ends[-1])
        row_of_token = np.arange(size) if total == size else np.repeat(np.arange(size), counts)
        slots, starts = self._slots[:size], self._starts[:size]
        slots.copy_(torch.from_numpy(host_slots))
        torch.index_select(table.length, 0, slots, out=starts)
        table.length.index_add_(0, slots, torch.from_numpy(counts).to(table.device))
        bounds = table.host.length[host_slots]
        table.host.length[host_slots] += counts
        own = self._place(starts, row_of_token, ends - counts, total)
        rows = Rows(
            counts=counts,
            row_of_token=row_of_token,
            bounds=bounds,
            slot_of_token=slots if total == size else slots[torch.from_numpy(row_of_token).to(slots.device)],
            starts=starts,
            positions=own,
            slots=slots,
            tables=table.tables,
        )
        reads = np.array(plan.reads, dtype=np.int64)
        tokens = self._inputs(plan, slots, row_of_token, total)
        lengths = self._lengths(own, slots, row_of_token) if self._by_length else None
        return Batch(rows, Positions(own, lengths), tokens, ends - counts, ends[reads] - 1, host_slots[reads])

    def _place(self, starts: Tensor, row_of_token: Ints, firsts: Ints, total: int) -> Tensor:
        """[tokens] positions: each row counts on from its start."""
        positions = self._positions[:total]
        if total == len(starts):
            return positions.copy_(starts)
        offsets = np.arange(total) - firsts[row_of_token]
        torch.index_select(starts, 0, torch.from_numpy(row_of_token).to(starts.device), out=positions)
        return positions.add_(torch.from_numpy(offsets).to(starts.device))

    def _lengths(self, positions: Tensor, slots: Tensor, row_of_token: Ints) -> Tensor:
        """[tokens] what each one's sequence counts as: at least its own length up to the token."""
        of_rows = self._table.counts_as.index_select(0, slots)
        return torch.maximum(of_rows[torch.from_numpy(row_of_token).to(slots.device)], positions + 1)

    def _inputs(self, plan: Plan, slots: Tensor, row_of_token: Ints, total: int) -> Tensor:
        """[tokens] ids: what the plan gives, and for every other row what its slot drew last."""
        tokens = self._tokens[:total]
        if len(plan.given) == len(plan.slots):
            return tokens.copy_(torch.from_numpy(np.array(plan.tokens, dtype=np.int64)))
        last = self._table.last.index_select(0, slots)
        if not plan.given:
            return tokens.copy_(last)
        torch.index_select(last, 0, torch.from_numpy(row_of_token).to(last.device), out=tokens)
        is_given = np.zeros(len(plan.slots), dtype=np.bool_)
        is_given[plan.given] = True
        where = torch.from_numpy(np.flatnonzero(is_given[row_of_token])).to(last.device)
        return tokens.index_copy_(0, where, torch.tensor(plan.tokens, device=last.device))
