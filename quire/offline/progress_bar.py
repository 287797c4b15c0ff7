"""The progress bar of an offline call, on a terminal or in a notebook."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from quire.foundation.processes.notebook import StatusLine, is_notebook

if TYPE_CHECKING:
    from rich.progress import TaskID

_CELLS = 24


class ProgressBar(AbstractContextManager["ProgressBar"], Protocol):
    """Shows how many sequences have ended."""

    def advance(self, tokens: int) -> None:
        """Count one more sequence that has ended, with this many tokens."""


def shown_bar(total: int) -> ProgressBar | None:
    """A bar over `total` sequences, where somebody watches: on a terminal or in a notebook."""
    if sys.stderr.isatty():
        return TerminalBar(total)
    return NotebookBar(total) if is_notebook() else None


class TerminalBar:
    """Progress over `total` sequences, `done` of which had ended before, with output tokens a second."""

    def __init__(self, total: int, done: int = 0) -> None:
        # rich takes a tenth of a second to import: only a bar that is shown pays it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._total = total
        self._done = done
        self._tokens = 0

    def __enter__(self) -> TerminalBar:
        self._progress.start()
        self._task: TaskID = self._progress.add_task("", total=self._total, completed=self._done, rate="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, tokens: int) -> None:
        self._tokens += tokens
        elapsed = self._progress.tasks[self._task].elapsed or 0.0
        rate = f"{self._tokens / elapsed:,.0f} tokens/s" if elapsed else ""
        self._progress.update(self._task, advance=1, rate=rate)


class NotebookBar:
    """Progress over `total` sequences as a line of text, which stays with its last figures."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = self._tokens = 0
        self._line = StatusLine()

    def __enter__(self) -> NotebookBar:
        self._began = time.monotonic()
        self._line.show(self._text())
        return self

    def __exit__(self, *_: object) -> None:
        self._line.show(self._text(), end="\n")

    def advance(self, tokens: int) -> None:
        self._done += 1
        self._tokens += tokens
        self._line.show(self._text())

    def _text(self) -> str:
        seconds = time.monotonic() - self._began
        filled = _CELLS * self._done // max(1, self._total)
        rate = f", {self._tokens / seconds:,.0f} tokens/s" if self._tokens and seconds > 0 else ""
        return f"Generating |{'█' * filled:<{_CELLS}}| {self._done}/{self._total} in {seconds:.1f} s{rate}"
