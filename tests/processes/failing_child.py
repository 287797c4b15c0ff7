"""What a test starts: it fails with its model's name as the message."""

from __future__ import annotations

from quire.errors import GenerationError
from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.launch import LaunchConfig, SendReport


def main(launch: LaunchConfig, report: SendReport) -> None:
    """Fail."""
    raise GenerationError(launch.config.model.model)


if __name__ == "__main__":
    run_child(main)
