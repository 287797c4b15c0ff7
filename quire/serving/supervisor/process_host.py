"""What a supervisor needs from the machine that its processes run on: how to start them, and one blocking call that
waits for signals and the reports and deaths of children. Simulations bring their own.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.engine.client import DeathNotices
from quire.engine.flight_record import requests_in_flight
from quire.foundation.messages.from_engine import Dead, EngineId
from quire.foundation.processes.child_process import Child, ChildProcess, process_state
from quire.foundation.processes.launch import LaunchConfig, Report

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RELOAD = signal.SIGHUP
_SIGNALS = (*STOP_SIGNALS, RELOAD)


@dataclass(frozen=True)
class Signalled:
    """SIGTERM, SIGINT or SIGHUP arrived."""

    number: int


@dataclass(frozen=True)
class Reported:
    child: Child
    report: Report


@dataclass(frozen=True)
class Died:
    """A child is gone. All its reports came before."""

    child: Child


Event = Signalled | Reported | Died


class ProcessEvents:
    """Waits for signals and children with one selector. Owns the signal handlers until `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        self._wakeup_write = wakeup_write
        self._previous_wakeup = signal.set_wakeup_fd(wakeup_write)
        heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        self._previous = {number: signal.signal(number, lambda *_: None) for number in heard}
        self._had_terminal = _has_terminal()
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)

    def watch(self, child: Child) -> None:
        self._selector.register(child.pid_fd, selectors.EVENT_READ, child)
        self._selector.register(child.report_fd, selectors.EVENT_READ, child)

    def forget(self, child: Child) -> None:
        """Stop waiting for this child. Call it before the child's descriptors are closed."""
        for fd in (child.pid_fd, child.report_fd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)

    def wait(self, timeout: float | None) -> Iterator[Event]:
        """Events, after waiting up to `timeout` seconds for the first."""
        dead: list[Child] = []
        for key, _ in self._selector.select(timeout):
            child = key.data
            if child is None:
                arrived = os.read(self._wakeup, 64)
                yield from (Signalled(self._meant(number)) for number in arrived if number in _SIGNALS)
                continue
            yield from (Reported(child, report) for report in child.reports())
            if key.fd == child.pid_fd:
                dead.append(child)
            elif child.exit_code() is not None and child.report_fd in self._selector.get_map():
                self._selector.unregister(child.report_fd)  # at its end it would be readable for ever
        for child in dead:
            yield from (Reported(child, report) for report in child.reports())
            self.forget(child)
            yield Died(child)

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._selector.close()
        os.close(self._wakeup)
        os.close(self._wakeup_write)

    def _meant(self, number: int) -> int:
        """What a signal means. SIGHUP also comes when the terminal is closed, and then asks for the end."""
        return signal.SIGTERM if number == RELOAD and self._had_terminal and not _has_terminal() else number


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


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


StartChild = Callable[[str, str, LaunchConfig], Child]
"""Starts a child, given its name, its module and its launch configuration."""


@dataclass(frozen=True)
class ProcessHost:
    """How processes are started, watched and told about each other.

    Attributes:
        start: Starts a child; see `StartChild`.
        events: Begins to wait for signals and children.
        notices: Opens the way to the processes whose sockets are in a directory.
        in_flight: The requests that a dead engine was working on.
        state: The kernel's letter for a process's state, by pid; see `process_state`.
    """

    start: StartChild = ChildProcess
    events: Callable[[], Events] = ProcessEvents
    notices: Callable[[Path], Notices] = DeathNotices
    in_flight: Callable[[Path, EngineId], list[int]] = requests_in_flight
    state: Callable[[int], str] = process_state


THIS_MACHINE = ProcessHost()
"""The machine of a real server."""
