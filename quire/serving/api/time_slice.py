"""Long work of one task: cut, so that other callbacks of the event loop run in between, or done in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

PIECE_S = 5e-3
"""How long a task may work before it lets others run; one step of it comes on top."""

MANY = 256
"""More messages or items are converted in a thread."""


async def convert(number: int, work: Callable[[], T]) -> T:
    """What `work` makes of so many messages or items."""
    return work() if number <= MANY else await asyncio.to_thread(work)


class TimeSlice:
    """The time that a task holds the event loop, from when this is made. Between steps of its work the task offers the
    loop to others."""

    def __init__(self) -> None:
        self._begun = perf_counter()

    async def offer(self) -> None:
        """Let others run, if this task has held the loop for long."""
        if perf_counter() - self._begun > PIECE_S:
            await asyncio.sleep(0)
            self._begun = perf_counter()
