"""The engine process: `python -m quire.engine.start`, started by the supervisor."""

from __future__ import annotations

from quire.foundation.config import environment
from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.launch import LaunchConfig, SendReport
from quire.runtime.executor.early_loading import begin_loading


def main(launch: LaunchConfig, report: SendReport) -> None:
    """Run the engine, whose modules are imported while a thread loads torch's library."""
    config = launch.config
    if config.parallel.data_parallel_size > 1 and config.device.device == "cuda":
        environment.show_gpus_of_engine(launch.engine.engine, config.parallel.ranks)
    if config.parallel.ranks == 1 and launch.group is None:  # else ranks compute, each in a process of its own
        begin_loading(meta_kernels=False)
    from quire.engine import process

    process.main(launch, report)


if __name__ == "__main__":
    run_child(main, "engine")
