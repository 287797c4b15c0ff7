"""Which executor serves a device."""

from __future__ import annotations

from quire.clock import Clock
from quire.config import Config
from quire.executor.executor import Executor
from quire.executor.local import LocalExecutor
from quire.executor.stream import StreamExecutor


def executor_for(config: Config, clock: Clock) -> Executor:
    """The executor of one device, by resolved settings; not started."""
    return StreamExecutor(config, clock) if config.device.device == "cuda" else LocalExecutor(config, clock)
