"""What a supervisor waits for, as one blocking call: signals, and the reports and deaths of children."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from quire.foundation.processes.child import Child
from quire.foundation.processes.launch import Report

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
        """Wait for this child too."""
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
        """Restore the signal handlers."""
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
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
