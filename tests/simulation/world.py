"""Virtual time: what happens at which moment, in an order that follows from the seed alone.

Knows nothing about servers.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import deque
from collections.abc import Callable

MAX_EVENTS_AT_ONCE = 50_000
"""More than that at one moment, and something spins."""
_BEGIN = 1_000.0
_TRACE_LINES = 80


class SimulationError(AssertionError):
    """An invariant was violated."""


class Timer:
    """Something that is going to happen."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """It is not."""
        self.action = None


class World:
    """A Clock, and the queue of what is going to happen.

    Args:
        seed: Everything that is random follows from it.

    Attributes:
        fingerprint: A checksum of everything that was said so far: equal for equal runs.
        problem: The first thing that went wrong; empty so far.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.fingerprint = 0
        self.problem = ""
        self._now = _BEGIN
        self._jumped = 0.0
        self._events: list[tuple[float, float, int, Timer]] = []
        self._count = self._at_once = 0
        self._ties = self.random("ties")
        self._trace: deque[str] = deque(maxlen=_TRACE_LINES)

    def random(self, name: str) -> random.Random:
        """A source of random numbers of its own for each purpose, so that one does not disturb another."""
        return random.Random(f"{self.seed} {name}")

    def now(self) -> float:
        """Virtual seconds."""
        return self._now

    @property
    def lived(self) -> float:
        """Virtual seconds since the beginning in which things could happen."""
        return self._now - _BEGIN - self._jumped

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        """Let something happen at a time. What happens at the same time has a random order."""
        timer = Timer(action)
        self._count += 1
        heapq.heappush(self._events, (when, self._ties.random(), self._count, timer))
        return timer

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        """The same in so many seconds."""
        return self.at(self._now + seconds, action)

    def jump(self, seconds: float) -> None:
        """The whole machine stands still for so long: what was due meanwhile happens late."""
        self._now += seconds
        self._jumped += seconds

    def next(self) -> bool:
        """Let the next thing happen; False if there is none."""
        while self._events:
            when, _, _, timer = heapq.heappop(self._events)
            if timer.action is None:
                continue
            if when > self._now:
                self._now, self._at_once = when, 0
            self._at_once += 1
            if self._at_once > MAX_EVENTS_AT_ONCE:
                self.fail("time stands still: something spins")
                return False
            action, timer.action = timer.action, None
            action()
            return True
        return False

    def say(self, what: str) -> None:
        """Note what happens."""
        line = f"{self._now:.6f} {what}"
        self.fingerprint = zlib.crc32(line.encode(), self.fingerprint)
        self._trace.append(line)

    def fail(self, problem: str) -> None:
        """An invariant is violated; only the first one counts. The run ends before the next thing happens."""
        if not self.problem:
            self.problem = f"{problem} (at {self._now:.6f})"
            self.say(f"PROBLEM {problem}")

    def trace(self) -> str:
        """The last things that happened."""
        return "\n".join(self._trace)
