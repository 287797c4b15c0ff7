"""An offline engine in a process of its own, for measuring its start: `python -m quire.bench.llm_process`."""

from __future__ import annotations

from collections.abc import Callable

from quire.offline.llm import LLM
from quire.processes import child


def main(launch: child.Launch, report: Callable[[child.Report], None]) -> None:
    """Load the model as a script would, and say how long that took."""
    with LLM(**launch.config.changes()) as llm:
        report(child.Report("ready", startup=llm.startup))


if __name__ == "__main__":
    child.run(main)
