"""What a supervisor needs from the machine that its processes run on. Simulations bring their own."""

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
    """Signals, and the reports and deaths of children; see ProcessEvents."""

    def watch(self, child: Child) -> None: ...

    def forget(self, child: Child) -> None: ...

    def wait(self, timeout: float | None) -> Iterator[Event]: ...

    def close(self) -> None: ...


class Notices(Protocol):
    """Tells clients and engines about the death of the other side; see DeathNotices."""

    def engine_died(self, client: int, message: Dead) -> None: ...

    def client_died(self, engine: EngineId, client: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ProcessHost:
    """How processes are started, watched and told about each other.

    Attributes:
        start: Starts a child, given its name, its module and its launch configuration.
        events: Begins to wait for signals and children.
        notices: Opens the way to the processes whose sockets are in a directory.
        in_flight: The requests that a dead engine was working on.
        state: The kernel's letter for a process's state, by pid; see `process_state`.
    """

    start: Callable[[str, str, LaunchConfig], Child] = ChildProcess
    events: Callable[[], Events] = ProcessEvents
    notices: Callable[[Path], Notices] = DeathNotices
    in_flight: Callable[[Path, EngineId], list[int]] = requests_in_flight
    state: Callable[[int], str] = process_state


THIS_MACHINE = ProcessHost()
"""The machine of a real server."""
