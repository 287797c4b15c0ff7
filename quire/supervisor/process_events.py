"""What a supervisor waits for, as one blocking call: signals, reports and deaths of children."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from quire.processes.child import Child
from quire.processes.launch import Report

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RELOAD = signal.SIGHUP
_SIGNALS = (*STOP_SIGNALS, RELOAD)


@dataclass(frozen=True)
class Signalled:
    """SIGTERM, SIGINT or SIGHUP arrived."""

    number: int


@dataclass(frozen=True)
class Reported:
    """A child sent a report."""

    child: Child
    report: Report


@dataclass(frozen=True)
class Died:
    """A child is gone; its reports came before."""

    child: Child


Event = Signalled | Reported | Died


class ProcessEvents:
    """Waits for signals and children with one selector. Owns the handlers of the signals until `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        self._wakeup_write = wakeup_write
        self._previous_wakeup = signal.set_wakeup_fd(wakeup_write)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)

    def watch(self, child: Child) -> None:
        """Wait for one more child, too."""
        self._selector.register(child.pid_fd, selectors.EVENT_READ, child)
        self._selector.register(child.report_fd, selectors.EVENT_READ, child)

    def forget(self, child: Child) -> None:
        """Wait for it no more, before its descriptors are closed."""
        for fd in (child.pid_fd, child.report_fd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)

    def wait(self, timeout: float | None) -> Iterator[Event]:
        """Events, after waiting up to `timeout` seconds for the first."""
        dead: list[Child] = []
        for key, _ in self._selector.select(timeout):
            child = key.data
            if child is None:
                yield from (Signalled(number) for number in os.read(self._wakeup, 64) if number in _SIGNALS)
                continue
            yield from (Reported(child, report) for report in child.reports())
            if key.fd == child.pid_fd:
                dead.append(child)
            elif child.exit_code() is not None and child.report_fd in self._selector.get_map():
                self._selector.unregister(child.report_fd)  # at its end: readable for ever
        for child in dead:
            yield from (Reported(child, report) for report in child.reports())
            self.forget(child)
            yield Died(child)

    def close(self) -> None:
        """Restore the signal handlers."""
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._selector.close()
        os.close(self._wakeup)
        os.close(self._wakeup_write)
