"""What an engine holds right now, as the live picture shows it: one small frame, made only when somebody asks.

A frame costs the same however many blocks there are, but for the first one, which begins with as much of the map as can
be had in a moment. It has all totals and rows of requests, and the next part of the
blocks and of the requests' tables; the viewer puts the parts together. It has no text and no token. A new one is made
at most every few steps, the more requests run the fewer, so a step pays microseconds for it however long it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from quire.engine.step_stats import StepStats
from quire.foundation.clock import Clock
from quire.foundation.messages.to_engine import NONE_SEEN
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.scheduler import Scheduler

NEW_S = 0.2
"""Shortest time between two frames, in seconds."""
ROWS_A_STEP = 4
"""A frame is made once the steps since the last one, times this number, reach the number of running requests."""
LATE_S = 2.0
"""Time after which a frame is made however few steps there were, in seconds."""
MAX_RUNNING = 128
MAX_WAITING = 32
BLOCKS = 1_024
"""Blocks whose state is in one frame."""
TABLE_BLOCKS = 512
"""Entries of running requests' block tables that are in one frame."""
FIRST_BLOCKS = 32_768
"""Blocks in a frame for somebody who has seen none: the step it comes between pays a millisecond or two for them."""
FIRST_TABLE_BLOCKS = 8_192


class EngineFrames:
    """Makes the frames of one engine. `counts` counts what is held and free."""

    def __init__(
        self, scheduler: Scheduler, steps: StepStats, clock: Clock, counts: Callable[[Scheduler], dict[str, int]]
    ) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._clock = clock
        self._counts = counts
        self._next_block = 1  # what comes next of the blocks,
        self._place = self._entry = 0  # and of the tables: the running request at this place, from this entry on
        self._last: dict[str, Any] = {"number": 0, "now": -LATE_S, "step": 0}

    def frame(self, seen: int) -> dict[str, Any]:
        """The newest frame, as plain values for a Done; only its number if the client has seen it."""
        if seen == NONE_SEEN:
            self._next_block, self._place, self._entry = 1, 0, 0
            self._last = self._make(FIRST_BLOCKS, FIRST_TABLE_BLOCKS)
        elif self._is_due:
            self._last = self._make(BLOCKS, TABLE_BLOCKS)
        number: int = self._last["number"]
        return {"number": number} if seen == number else self._last

    @property
    def _is_due(self) -> bool:
        age: float = self._clock.now() - self._last["now"]
        if age < NEW_S or not self._scheduler.steps_in_flight:
            return age >= NEW_S
        steps: int = self._steps.last_step - self._last["step"]
        return steps * ROWS_A_STEP >= len(self._scheduler.running) or age >= LATE_S

    def _make(self, max_blocks: int, max_table_blocks: int) -> dict[str, Any]:
        scheduler, stats = self._scheduler, self._scheduler.stats
        return {
            "number": self._last["number"] + 1,
            "now": self._clock.now(),
            "counts": self._counts(scheduler),
            "block_size": scheduler.pool.block_size,
            "step": self._steps.last_step,
            "step_ms": self._steps.last_step_ms,
            "computed_tokens": self._steps.token_sum,
            "prefix_queries": stats.prefix_queries,
            "prefix_hits": stats.prefix_hits,
            "running": self._rows(scheduler.running, MAX_RUNNING),
            "waiting": self._rows(scheduler.waiting, MAX_WAITING),
            "blocks": self._blocks(max_blocks),
            "tables": self._tables(max_table_blocks),
        }

    def _rows(self, requests: Iterable[Request], most: int) -> dict[str, list[Any]]:
        """Columns: `arrival` on the clock of `now`, and lengths in tokens: of the prompt, known, computed, limit."""
        first = list(islice(requests, most))
        return {
            "id": [request.id for request in first],
            "arrival": [request.add.arrival for request in first],
            **self._scheduler.lengths_of(first),
        }

    def _blocks(self, most: int) -> list[Any]:
        """The next blocks: the first one's number, and a letter for each, as `BlockPool.states` has them."""
        pool, first = self._scheduler.pool, self._next_block
        states = pool.states(first, most)
        end = first + len(states)
        self._next_block = end if end <= pool.num_blocks else 1
        return [first, states]

    def _tables(self, most: int) -> list[tuple[int, int, list[int]]]:
        """The next parts of running requests' tables: request, place of its first entry here, blocks. A block that
        several requests share is in each of their tables."""
        running, left, parts = self._scheduler.running, most, list[tuple[int, int, list[int]]]()
        for _ in range(len(running)):
            if self._place >= len(running):
                self._place = self._entry = 0
            request = running[self._place]
            blocks = request.table.held_blocks(self._entry, left)
            parts.append((request.id, self._entry, blocks))
            left -= len(blocks)
            if not left:
                self._entry += len(blocks)
                break
            self._place, self._entry = self._place + 1, 0
        return parts
