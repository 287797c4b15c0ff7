"""What a test starts in place of Ray's driver; the model's name says what it does."""

from __future__ import annotations

import time

from quire.errors import ConfigError
from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.launch import LaunchConfig, NodesPlaced, SendReport, StatusReport


def main(launch: LaunchConfig, report: SendReport) -> None:
    """Fail, die, or place nodes."""
    does = launch.config.model.model
    if does == "fails":
        raise ConfigError("Ray's cluster has 2 nodes, and 3 are needed.")
    report(NodesPlaced(1, "127.0.0.1") if does == "alone" else NodesPlaced(launch.config.parallel.nodes, "10.0.0.1"))
    if does == "dies before it is ready":
        return
    report(StatusReport("ready"))
    if does == "stays":
        time.sleep(60)


if __name__ == "__main__":
    run_child(main, "ray")
