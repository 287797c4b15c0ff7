"""The executor of a device, or of several ranks."""

from __future__ import annotations

from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.processes.launch import GroupEnds
from quire.runtime.executor.cpu_executor import CpuExecutor
from quire.runtime.executor.executor import Executor
from quire.runtime.executor.gpu_executor import GpuExecutor
from quire.runtime.executor.multi_rank_executor import MultiRankExecutor


def build_executor(
    config: Config, clock: Clock, group: GroupEnds | None = None, host_memory: memoryview | None = None
) -> Executor:
    """Build the executor for the device of resolved settings, without starting it. The ranks of an engine that divides
    experts with others, as `group` says, are always processes. Host blocks lie in `host_memory`,
    if there is any, which only a lone CPU may have."""
    if config.parallel.ranks > 1 or group is not None:
        return MultiRankExecutor(config, clock, group=group)
    if config.device.device == "cuda":
        return GpuExecutor(config, clock)
    return CpuExecutor(config, clock, host_memory=host_memory)
