"""An event loop that knows how much processor time each of its callbacks takes.

Whatever runs in the API process's loop keeps every other stream waiting, so no piece of work there may be long. Owns
the measurement, which `/metrics` shows; knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, TypeVarTuple

import uvloop

from quire.engine.metrics.histogram import WorkTimes

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

AIM_S = 0.02
"""A callback of more processor time is named in the log, if it is much longer than all before."""
WARNED_S = 0.1
"""From here on as a warning."""
_LONGER = 1.25
_SHORT_S = 1e-3
"""What takes no longer by the wall clock is counted by it: that is an upper bound, and the first bucket's."""
_STALE_S = 5e-4
"""How old the last reading of the thread's clock may be. It is a system call, so it is not read for each callback."""


class CallbackTimes:
    """Processor times of callbacks, correct to half a millisecond.

    Args:
        times: Where they are counted.
    """

    def __init__(self, times: WorkTimes) -> None:
        self._times = times
        self._wall = self._processor = 0.0  # read at the same moment

    def run(self, callback: Callable[[*Ts], object], *arguments: *Ts) -> None:
        """Call it, and count its time."""
        begun = perf_counter()
        if begun - self._wall > _STALE_S:
            self._processor, self._wall = thread_time(), begun
        try:
            callback(*arguments)
        finally:
            took = perf_counter() - begun
            if took > _SHORT_S:
                took = min(took, thread_time() - self._processor)
                self._wall = 0.0
            longest = self._times.longest
            self._times.observe(took)
            if took > max(_LONGER * longest, AIM_S):
                level = logging.WARNING if took > WARNED_S else logging.INFO
                logger.log(level, "%s held the event loop for %.0f ms.", _name(callback), took * 1e3)


class MeasuredLoop(uvloop.Loop):
    """uvloop, with each callback measured. What uvloop calls by itself is measured where it arrives, see
    `BoundedHttpProtocol`."""

    def __init__(self, times: WorkTimes) -> None:
        super().__init__()
        self.callback_times = CallbackTimes(times)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self.callback_times.run, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self.callback_times.run, callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_later(delay, self.callback_times.run, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self.callback_times.run, callback, *args, context=context)

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        super().add_reader(fd, self.callback_times.run, callback, *args)


def _name(callback: Callable[..., object]) -> str:
    """What a callback runs: of a task's step, its coroutine."""
    owner = getattr(callback, "__self__", None)
    what = owner.get_coro() if isinstance(owner, asyncio.Task) else callback
    return str(getattr(what, "__qualname__", what))
