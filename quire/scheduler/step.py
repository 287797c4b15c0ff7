"""A step in the making, and what the host remembers of it while it runs.

Owns the translation from requests to the columns of a Plan; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.kvcache.table import TableChange
from quire.messages import Admitted, Plan
from quire.scheduler.request import Request


class Row(NamedTuple):
    """One request's share of a step. `epoch` tells a row of before a preemption from one after it."""

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
    _admitted: list[Admitted] = field(default_factory=list)
    _block_slots: list[int] = field(default_factory=list)
    _changes: list[TableChange] = field(default_factory=list)
    _given: list[int] = field(default_factory=list)
    _given_tokens: list[int] = field(default_factory=list)

    def admit(self, request: Request) -> None:
        """Its slot is new in this step."""
        assert request.slot is not None
        sampling = request.add.sampling
        self._admitted.append(
            Admitted(
                slot=request.slot,
                seed=request.add.seed,
                drawn=request.output_len,
                temperature=0.0 if sampling.greedy else sampling.temperature,
                top_p=sampling.top_p,
                top_k=max(0, sampling.top_k),
                min_p=sampling.min_p,
                logprobs=sampling.logprobs,
                min_tokens=sampling.min_tokens,
                stop_ids=request.add.stop_ids if sampling.min_tokens else [],
            )
        )

    def move(self, request: Request, count: int, changes: list[TableChange]) -> None:
        """The request moves forward by `count` tokens, into blocks that `changes` add to its table."""
        assert request.slot is not None
        self._block_slots.extend([request.slot] * len(changes))
        self._changes.extend(changes)
        start = request.planned
        if start < len(request.tokens):
            # Rows whose input the host does not know are single tokens just drawn: the device has them in the slot.
            assert start + count <= len(request.tokens)
            self._given.append(len(self.rows))
            self._given_tokens.extend(request.tokens[start : start + count])
        self.tokens += count
        self.rows.append(Row(request, request.slot, count, request.move(count), request.epoch))

    def plan(self) -> Plan:
        """The step as the workers get it."""
        return Plan(
            step=self.number,
            admitted=self._admitted,
            block_slots=self._block_slots,
            block_groups=[change.group for change in self._changes],
            block_indices=[change.entry for change in self._changes],
            block_ids=[change.block for change in self._changes],
            slots=[row.slot for row in self.rows],
            counts=[row.n for row in self.rows],
            given=self._given,
            tokens=self._given_tokens,
            reads=[index for index, row in enumerate(self.rows) if row.draws],
        )
