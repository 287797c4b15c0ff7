"""A step that was launched: what comes of it once the device is done.

Knows nothing about plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.messages import Result


class Flight(Protocol):
    """A step under way."""

    def done(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def wait(self) -> None:
        """Until the device is done."""
        ...

    def result(self) -> Result:
        """What it brought; waits for the device. Asked once."""
        ...


class Landed:
    """A step that was over when it was launched, as on a CPU."""

    def __init__(self, result: Result) -> None:
        self._result = result

    def done(self) -> bool:
        """See Flight."""
        return True

    def wait(self) -> None:
        """See Flight."""

    def result(self) -> Result:
        """See Flight."""
        return self._result


class StreamFlight:
    """A step on a GPU's stream.

    Args:
        began, ended: Events around it.
        finish: Reads what came back to the host; is told how many milliseconds the step took.
    """

    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event, finish: Callable[[float], Result]) -> None:
        self._began = began
        self._ended = ended
        self._finish = finish

    def done(self) -> bool:
        """See Flight."""
        return bool(self._ended.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See Flight."""
        self._ended.synchronize()

    def result(self) -> Result:
        """See Flight."""
        self.wait()
        return self._finish(self._began.elapsed_time(self._ended))


class HostWatch:
    """Over a step that is computed as it is launched."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def to_host(self, columns: Sequence[Tensor]) -> Sequence[Tensor]:
        """Outputs on the host."""
        return columns

    def flight(self, finish: Callable[[float], Result]) -> Flight:
        """The step, over; `finish` is told how many milliseconds it took."""
        return Landed(finish((time.perf_counter() - self._began) * 1e3))


class StreamWatch:
    """Over a step that is launched on a GPU's current stream; `copies` is where its outputs go."""

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._began.record()

    def to_host(self, columns: Sequence[Tensor]) -> Sequence[Tensor]:
        """Outputs on the host, there once the flight is done."""
        return self._copies.take(columns)

    def flight(self, finish: Callable[[float], Result]) -> Flight:
        """The step, launched; `finish` reads its outputs later."""
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended.record()
        return StreamFlight(self._began, ended, finish)


Watch = HostWatch | StreamWatch
"""Times a step and brings its outputs to the host."""


class HostCopies:
    """Pinned memory into which a step's outputs travel, in turns: one step may be read while the next ones are written.

    Args:
        size: Entries of a column.
        dtypes: Of the columns.
        turns: Steps that may be under way, and one more.
    """

    def __init__(self, size: int, dtypes: Sequence[torch.dtype], turns: int = 3) -> None:
        self._turns = [[torch.zeros(size, dtype=t, pin_memory=True) for t in dtypes] for _ in range(turns)]
        self._turn = 0

    def take(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Start copying; the copies are there when the stream has come so far."""
        self._turn = (self._turn + 1) % len(self._turns)
        copies = [host[: len(c)] for host, c in zip(self._turns[self._turn], columns, strict=True)]
        for copy, column in zip(copies, columns, strict=True):
            copy.copy_(column, non_blocking=True)
        return copies
