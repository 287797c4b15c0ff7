"""The executor of a device."""

from __future__ import annotations

from quire.clock import Clock
from quire.config import Config
from quire.executor.executor import Executor
from quire.executor.local import LocalExecutor
from quire.executor.stream import StreamExecutor


def build_executor(config: Config, clock: Clock) -> Executor:
    """The executor for the device of resolved settings; not started."""
    return StreamExecutor(config, clock) if config.device.device == "cuda" else LocalExecutor(config, clock)
