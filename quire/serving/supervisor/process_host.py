"""What a supervisor needs of the machine that its processes run on; a simulation brings its own. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.engine.flight_record import requests_in_flight
from quire.engine.transport import DeathNotices
from quire.foundation.messages.from_engine import Dead, EngineId
from quire.foundation.processes.child import Child
from quire.foundation.processes.child_process import ChildProcess, process_state
from quire.foundation.processes.launch import LaunchConfig
from quire.serving.supervisor.process_events import Event, ProcessEvents


class Events(Protocol):
    """Signals, reports and deaths, see ProcessEvents."""

    def watch(self, child: Child) -> None:
        """Wait for this child, too."""
        ...

    def forget(self, child: Child) -> None:
        """Wait for this child no more."""
        ...

    def wait(self, timeout: float | None) -> Iterator[Event]:
        """Events, after waiting up to `timeout` seconds for the first."""
        ...

    def close(self) -> None:
        """Stop waiting for signals and children."""
        ...


class Notices(Protocol):
    """Tells clients and engines about the death of the other side, see DeathNotices."""

    def engine_died(self, client: int, message: Dead) -> None:
        """Tell a client."""
        ...

    def client_died(self, engine: EngineId, client: int) -> None:
        """Tell an engine."""
        ...

    def close(self) -> None:
        """Close the way: no more deaths are told."""
        ...


@dataclass(frozen=True)
class ProcessHost:
    """How processes are started, watched and told about each other.

    Attributes:
        start: Starts a child: its name, its module, what it is told.
        events: Begins to wait for signals and children.
        notices: The way to the processes whose sockets are in a directory.
        in_flight: The requests that a dead engine was working on.
        state: What the kernel says of a process, see `process_state`.
    """

    start: Callable[[str, str, LaunchConfig], Child] = ChildProcess
    events: Callable[[], Events] = ProcessEvents
    notices: Callable[[Path], Notices] = DeathNotices
    in_flight: Callable[[Path, EngineId], list[int]] = requests_in_flight
    state: Callable[[int], str] = process_state


THIS_MACHINE = ProcessHost()
"""Where the processes of a real server run."""
