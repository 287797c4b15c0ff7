"""An engine in a process of its own, for a program that talks to it without a server."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from pathlib import Path
from types import TracebackType

from quire.engine.client import DeathNotices, ZmqClient
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Dead, EngineId
from quire.foundation.processes.child_main import raise_reported_failure
from quire.foundation.processes.child_process import ChildProcess
from quire.foundation.processes.launch import LaunchConfig

STOP_TIMEOUT_S = 5.0


class EngineProcess:
    """A context in which an engine with these resolved settings runs."""

    def __init__(self, config: Config) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="quire-"))  # readable by its owner only
        self._engine = EngineId()
        self._child = ChildProcess("engine", "quire.engine.start", LaunchConfig(config, str(self._directory)))

    def client(self) -> ZmqClient:
        """The connection to the engine. Call this once."""
        return ZmqClient(self._directory, 0, self._engine)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the client when the engine dies. Call this in the loop's thread."""

        def tell() -> None:
            loop.remove_reader(self._child.pid_fd)
            notices = DeathNotices(self._directory)
            notices.engine_died(0, Dead(self._child.cause_of_death(), source=self._engine))
            notices.close()

        loop.add_reader(self._child.pid_fd, tell)

    def raise_failure(self) -> None:
        """Raise the SetupError that the engine reported, if its start failed."""
        self._child.reports()
        if self._child.failure is not None:
            raise_reported_failure(self._child.failure)

    @property
    def cause_of_death(self) -> str:
        """Why the engine is gone, in one line without a full stop."""
        return self._child.cause_of_death()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.signal(signal.SIGKILL)  # nothing of the engine outlives it
        self._child.cause_of_death()
        self._child.close()
        shutil.rmtree(self._directory, ignore_errors=True)
