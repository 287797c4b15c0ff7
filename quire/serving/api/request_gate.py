"""Where requests wait while no model serves. Knows nothing about models."""

from __future__ import annotations

import asyncio
import contextlib

from quire.engine.metrics.server_stats import SwapCounts

MAX_WAITING = 4_096
"""More are let through at once, to be refused: each that waits holds a connection."""


class RequestGate:
    """Open at first.

    Args:
        counts: Where it is counted how many wait.
    """

    def __init__(self, counts: SwapCounts) -> None:
        self._counts = counts
        self._opened = asyncio.Event()
        self._opened.set()
        self._patience_s = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether requests wait."""
        return not self._opened.is_set()

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._counts.waiting

    def close(self, patience_s: float) -> None:
        """From now on requests wait until `open`, and no longer than so many seconds each."""
        self._patience_s = patience_s
        self._opened.clear()

    def open(self) -> None:
        """All that wait go on."""
        self._opened.set()

    async def wait(self) -> None:
        """Until it is open, or the request's patience is over: then whoever it goes to refuses it."""
        if not self.is_closed or self.num_waiting >= MAX_WAITING:
            return
        self._counts.waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._opened.wait(), self._patience_s)
        finally:
            self._counts.waiting -= 1
