"""An offline engine in a process of its own, for measuring its start: `python -m quire.tools.bench.llm_process`."""

from __future__ import annotations

from quire import LLM
from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.launch import LaunchConfig, SendReport, StatusReport


def main(launch: LaunchConfig, report: SendReport) -> None:
    """Load the model as a script would, and say how long that took."""
    with LLM(**launch.config.changes()) as llm:
        report(StatusReport("ready", startup=llm.startup))


if __name__ == "__main__":
    run_child(main)
