"""How far reading the weights is: a bar on a terminal or in a notebook once it takes long, and figures for the log."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from quire.foundation.clock import Clock
from quire.foundation.processes.notebook import StatusLine, is_notebook

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from torch import Tensor

PATIENCE_S = 0.5
"""No bar before this many seconds."""
_GB = 1e9


class ReadingProgress:
    """Counts the bytes that several threads read, of `total`; shows a bar where somebody watches, if `visible`."""

    def __init__(self, total: int, clock: Clock, visible: bool) -> None:
        self._total = total
        self._clock = clock
        self._visible = visible and sys.stderr.isatty()
        self._line = StatusLine() if visible and not self._visible and is_notebook() else None
        self._lock = threading.Lock()
        self._done = 0
        self._bar: Progress | None = None
        self._task: TaskID

    def __enter__(self) -> ReadingProgress:
        self._began = self._clock.now()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = self._clock.now() - self._began
        if self._bar is not None:
            self._bar.stop()
        if self._line is not None and self.seconds > PATIENCE_S:
            self._line.show(f"Reading weights: {self._rate(self.seconds)}", end="\n")

    def count(self, name: str, out: Tensor) -> None:
        """Count the bytes that a tensor takes where it lives; `on_read` of ObservedReads."""
        self.advance(out.nbytes)

    def advance(self, amount: int) -> None:
        """`amount` more bytes are read."""
        with self._lock:
            self._done += amount
            seconds = self._clock.now() - self._began
            if self._bar is None and self._visible and seconds > PATIENCE_S:
                self._show()
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done, rate=self._rate(seconds))
            if self._line is not None and seconds > PATIENCE_S:
                self._line.show(f"Reading weights: {self._rate(seconds)}")

    def _rate(self, seconds: float) -> str:
        return f"{self._done / _GB:.2f}/{self._total / _GB:.2f} GB, {self._done / _GB / seconds:.2f} GB/s"

    def _show(self) -> None:
        # rich takes a tenth of a second to import: only a bar that is shown pays it.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("Reading weights"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=self._total, rate="")
        self._bar.start()
