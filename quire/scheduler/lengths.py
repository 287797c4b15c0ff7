"""How far every request is, as columns: one row a request, one array a length.

A step moves hundreds of requests by one token each. Column arithmetic does that in a few numpy calls where a loop over
objects would cost more than the device's work. `Request` reads and writes its row by properties, so code that is not
on the hot path sees plain attributes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]
COLUMNS = ("planned", "computed", "known", "drawing", "prompt", "limit", "room", "epoch", "serial", "held", "drafts",
           "masked", "shared")  # fmt: skip


class Lengths:
    """Columns over rows that requests take and give back.

    Attributes:
        planned, computed, known, drawing: See Request; `known` is the number of tokens the host knows. `planned` and
            `drawing` are upper bounds until the plans in flight have settled; `planned - drawing` is the lower one.
        prompt: Length of the prompt.
        limit: Length at which a request ends by count.
        room: Tokens that fit into its blocks as they are; from there on `BlockTable.reserve` is asked.
        epoch: Counts recomputations.
        serial: Tells a row's owner from an earlier one.
        held: 1 for a host-bound request: it moves only when the host knows all its tokens.
        drafts: Most tokens that a read may gain beside the one it draws.
        masked: 1 where every read waits for a mask.
        shared: Tokens that it will not compute, because it forks from a request that does.
    """

    planned: Column
    computed: Column
    known: Column
    drawing: Column
    prompt: Column
    limit: Column
    room: Column
    epoch: Column
    serial: Column
    held: Column
    drafts: Column
    masked: Column
    shared: Column

    def __init__(self, rows: int = 64) -> None:
        for name in COLUMNS:
            setattr(self, name, np.zeros(rows, dtype=np.int64))
        self._free = list(range(rows - 1, -1, -1))
        self._serials = 0

    def take(self, known: int, prompt: int, limit: int) -> int:
        """A row for a new request; its other lengths are 0."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        for name in COLUMNS:
            getattr(self, name)[row] = 0
        self._serials += 1
        self.serial[row] = self._serials
        self.known[row], self.prompt[row], self.limit[row] = known, prompt, limit
        return row

    def give_back(self, row: int) -> None:
        """Its request is over; steps in flight tell by the serial."""
        self.serial[row] = 0
        self._free.append(row)

    def behind(self, rows: Column) -> int:
        """Tokens that these rows still have to compute, of those that the host knows."""
        return int((self.known[rows] - np.maximum(self.planned[rows], self.shared[rows])).sum())

    def _grow(self) -> None:
        rows = len(self.planned)
        for name in COLUMNS:
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(rows, dtype=np.int64)]))
        self._free.extend(range(2 * rows - 1, rows - 1, -1))
