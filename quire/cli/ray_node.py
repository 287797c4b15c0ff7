"""Runs on another node of an engine, started by Ray as `python -m quire.cli.ray_node`: a follower like that of `quire
serve --headless`. Its output goes into the head's log, so it does not repeat the settings."""

from __future__ import annotations

from quire.foundation.clock import SystemClock
from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.launch import LaunchConfig, SendReport, StatusReport
from quire.planning.auto_config import resolve
from quire.runtime.executor.nodes.follower import Follower
from quire.serving.supervisor.announce import log_as_json, print_log


def main(launch: LaunchConfig, report: SendReport) -> None:
    """Choose settings, report ready, and follow the head until it ends. Raises SetupError if the settings do not suit
    this machine or the head refuses this node, and EngineDeadError if the head is gone."""
    if launch.config.observability.log_format == "json":
        log_as_json(f"node {launch.config.parallel.node_rank}")
    resolved = resolve(launch.config)
    report(StatusReport("ready"))
    Follower(resolved.config, SystemClock(), print_log).run()


if __name__ == "__main__":
    run_child(main, "node")
