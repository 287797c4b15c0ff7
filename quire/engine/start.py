"""The engine process: `python -m quire.engine.start`, started by the supervisor."""

from __future__ import annotations

from quire.executor.torch_library import begin_loading
from quire.processes.child_main import run_child
from quire.processes.launch import LaunchConfig, SendReport


def main(launch: LaunchConfig, report: SendReport) -> None:
    """Run the engine, whose modules are imported while a thread loads torch's library."""
    begin_loading()
    from quire.engine import process

    process.main(launch, report)


if __name__ == "__main__":
    run_child(main)
