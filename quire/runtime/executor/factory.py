"""The executor of a device, or of several ranks."""

from __future__ import annotations

from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.processes.launch import GroupEnds
from quire.runtime.executor.cpu_executor import CpuExecutor
from quire.runtime.executor.executor import Executor
from quire.runtime.executor.gpu_executor import GpuExecutor
from quire.runtime.executor.multi_rank_executor import MultiRankExecutor


def build_executor(config: Config, clock: Clock, group: GroupEnds | None = None) -> Executor:
    """The executor for the device of resolved settings; not started.

    Args:
        config: The settings.
        clock: For all times.
        group: What the engine shares with others that divide experts with it; then its ranks are processes.
    """
    if config.parallel.ranks > 1 or group is not None:
        return MultiRankExecutor(config, clock, group=group)
    return GpuExecutor(config, clock) if config.device.device == "cuda" else CpuExecutor(config, clock)
