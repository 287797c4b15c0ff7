"""What a test's actor starts in place of a follower; the model's name says what it does."""

from __future__ import annotations

import os
import time

from quire.errors import ModelNotFoundError
from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.launch import LaunchConfig, SendReport, StatusReport


def main(launch: LaunchConfig, report: SendReport) -> None:
    """Fail, end, or stay."""
    if launch.config.model.model == "missing":
        raise ModelNotFoundError("No such model here.")
    report(StatusReport("ready"))
    print(f"key {os.environ['QUIRE_NODE_KEY']}, threads {os.environ.get('OMP_NUM_THREADS')}", flush=True)
    print(f"process {os.getpid()}", flush=True)
    if launch.config.model.model == "stays":
        time.sleep(60)


if __name__ == "__main__":
    run_child(main, "node")
