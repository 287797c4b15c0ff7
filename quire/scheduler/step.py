"""A step in the making, and what the host remembers of it while it runs.

Owns the translation from requests to the columns of a Plan; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.kvcache.table import Reservation, TableChange
from quire.messages import Admitted, Plan
from quire.scheduler.request import Request


class Row(NamedTuple):
    """One request's share of a step. `epoch` tells a row of before a recomputation from one after it."""

    request: Request
    slot: int
    n: int
    draws: bool
    epoch: int


@dataclass
class Step:
    """Rows in batch order, with the differences that come before them."""

    number: int
    rows: list[Row] = field(default_factory=list)
    tokens: int = 0
    crowded: bool = False
    """Somebody was put back because blocks ran out: nobody new is admitted."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    _admitted: list[Admitted] = field(default_factory=list)
    _block_slots: list[int] = field(default_factory=list)
    _changes: list[TableChange] = field(default_factory=list)
    _copies: list[tuple[int, int]] = field(default_factory=list)
    _given: list[int] = field(default_factory=list)
    _given_tokens: list[int] = field(default_factory=list)

    def admit(self, request: Request) -> None:
        """Its slot is new in this step; what its table already holds is new to the slot."""
        assert request.slot is not None
        sampling = request.add.sampling
        self._admitted.append(
            Admitted(
                slot=request.slot,
                length=request.planned,
                seed=request.add.seed,
                drawn=request.output_len,
                sampling=sampling,
                stop_ids=request.add.stop_ids if sampling.min_tokens else [],
            )
        )
        self._enter(request.slot, request.table.entries())

    def move(self, request: Request, count: int, reservation: Reservation) -> None:
        """The request moves forward by `count` tokens, into what was reserved for it."""
        assert request.slot is not None
        self._enter(request.slot, reservation.changes)
        self._copies += reservation.copies
        start = request.planned
        if start < len(request.tokens):
            # Rows whose input the host does not know are single tokens just drawn: the device has them in the slot.
            assert start + count <= len(request.tokens)
            self._given.append(len(self.rows))
            self._given_tokens += request.tokens[start : start + count]
        self.tokens += count
        draws = request.move(count, self.number)
        self.rows.append(Row(request, request.slot, count, draws, request.epoch))

    def plan(self) -> Plan:
        """The step as the workers get it."""
        return Plan(
            step=self.number,
            admitted=self._admitted,
            block_slots=self._block_slots,
            block_groups=[change.group for change in self._changes],
            block_indices=[change.entry for change in self._changes],
            block_ids=[change.block for change in self._changes],
            swap_out=self.swap_out,
            copies=self._copies,
            swap_in=self.swap_in,
            slots=[row.slot for row in self.rows],
            counts=[row.n for row in self.rows],
            given=self._given,
            tokens=self._given_tokens,
            reads=[index for index, row in enumerate(self.rows) if row.draws],
        )

    def _enter(self, slot: int, changes: Sequence[TableChange]) -> None:
        self._block_slots += [slot] * len(changes)
        self._changes += changes
