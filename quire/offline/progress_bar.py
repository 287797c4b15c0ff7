"""The progress bar of an offline call."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ProgressBar:
    """Progress over `total` sequences, `done` of which had ended before, with output tokens a second."""

    def __init__(self, total: int, done: int = 0) -> None:
        self._progress = Progress(
            TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._total = total
        self._done = done
        self._tokens = 0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        self._task: TaskID = self._progress.add_task("", total=self._total, completed=self._done, rate="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, tokens: int) -> None:
        """Count one more sequence that has ended, with this many tokens."""
        self._tokens += tokens
        elapsed = self._progress.tasks[self._task].elapsed or 0.0
        rate = f"{self._tokens / elapsed:,.0f} tokens/s" if elapsed else ""
        self._progress.update(self._task, advance=1, rate=rate)
