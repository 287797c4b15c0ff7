"""What parent and child exchange: the launch configuration in, status reports out, and the exit code at the end.

Plain data for msgspec, sent as JSON. Knows nothing about pipes or processes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.config import Config
from quire.messages import EngineId

EXIT_CRASHED = 70
"""Exit code of a process that failed with an unexpected error (EX_SOFTWARE of sysexits.h)."""
EXIT_ORPHANED = 75
"""Exit code of a child whose parent is gone (EX_TEMPFAIL)."""


class LaunchConfig(msgspec.Struct, frozen=True):
    """Everything a child is told.

    Attributes:
        config: Resolved settings.
        directory: Private directory of the sockets.
        number: Which API process this is; 0 for the engine.
        engine: Which engine this is, or which one the API process talks to.
        listen_fd: Inherited listening socket, for API processes.
        developer_mode: Serve debug routes.
    """

    config: Config
    directory: str
    number: int = 0
    listen_fd: int = -1
    developer_mode: bool = False
    engine: EngineId = EngineId()


class StatusReport(msgspec.Struct, frozen=True):
    """What a child reports about itself.

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
