"""The executor of a device."""

from __future__ import annotations

from quire.clock import Clock
from quire.config import Config
from quire.executor.cpu_executor import CpuExecutor
from quire.executor.executor import Executor
from quire.executor.gpu_executor import GpuExecutor


def build_executor(config: Config, clock: Clock) -> Executor:
    """The executor for the device of resolved settings; not started."""
    return GpuExecutor(config, clock) if config.device.device == "cuda" else CpuExecutor(config, clock)
