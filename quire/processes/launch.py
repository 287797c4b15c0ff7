"""What parent and child exchange: the launch configuration in, reports out, and the exit code at the end.

Plain data for msgspec, sent as JSON. Knows nothing about pipes or processes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Literal

import msgspec

from quire.config import Config
from quire.messages import EngineId

EXIT_CRASHED = 70
"""Exit code of a process that failed with an unexpected error (EX_SOFTWARE of sysexits.h)."""
EXIT_ORPHANED = 75
"""Exit code of a child whose parent is gone (EX_TEMPFAIL)."""
STOP_ENGINE = signal.SIGUSR1
"""Ends an engine in order. Not SIGTERM: a service manager may send that to all processes at once, and the engine is
still needed until open requests are finished."""
PULSE_S = 1.0
"""Longest time between two pulses of a live process that is not busy with one thing."""


class LaunchConfig(msgspec.Struct, frozen=True):
    """Everything a child is told.

    Attributes:
        config: Resolved settings.
        directory: Private directory of the sockets.
        number: Which API process this is; 0 for the engine.
        listen_fd: Inherited listening socket, for API processes.
        developer_mode: Serve debug routes.
        engine: Which engine this is, or which one the API process talks to.
    """

    config: Config
    directory: str
    number: int = 0
    listen_fd: int = -1
    developer_mode: bool = False
    engine: EngineId = EngineId()


class StatusReport(msgspec.Struct, frozen=True, tag=True):
    """How a child's start went, or why it ends.

    Attributes:
        state: `ready` once; `failed` as the last report.
        error: For `failed`: the class name in `quire.errors`, or empty for an unexpected error.
        message: For `failed`: cause and next action, in one line.
        startup: For the engine's `ready`: seconds by stage.
        kv_tokens: For an API process's `ready`: tokens that the engine's KV cache holds.
    """

    state: Literal["ready", "failed"]
    error: str = ""
    message: str = ""
    startup: dict[str, float] = {}
    kv_tokens: int = 0


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """A child is alive.

    Attributes:
        stalled_s: For an engine: seconds since it last finished a step or had none to do.
        limit_s: How long that may last.
    """

    stalled_s: float = 0.0
    limit_s: float = 0.0


class Recovery(msgspec.Struct, frozen=True, tag=True):
    """An API process has got over an engine's death.

    Attributes:
        epoch: Of the engine that took over.
        sequences: How many went on with it.
        blamed: Whether a request was found that kills engines; it has failed.
        complete: Whether all requests of the last plan have moved on since.
    """

    epoch: int
    sequences: int = 0
    blamed: bool = False
    complete: bool = False


Report = StatusReport | Pulse | Recovery
SendReport = Callable[[Report], None]
