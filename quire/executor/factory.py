"""The executor of a device, or of several ranks."""

from __future__ import annotations

from quire.clock import Clock
from quire.config import Config
from quire.executor.cpu_executor import CpuExecutor
from quire.executor.executor import Executor
from quire.executor.gpu_executor import GpuExecutor
from quire.executor.multi_rank_executor import MultiRankExecutor


def build_executor(config: Config, clock: Clock) -> Executor:
    """The executor for the device of resolved settings; not started."""
    if config.parallel.ranks > 1:
        return MultiRankExecutor(config, clock)
    return GpuExecutor(config, clock) if config.device.device == "cuda" else CpuExecutor(config, clock)
