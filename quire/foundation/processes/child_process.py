"""The parent's side: start a child by command line, receive its reports, see its death.

Launch configuration, orders, reports and death all go through file descriptors, so one selector watches everything.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Protocol

import msgspec

from quire.foundation.processes.begun_process import BegunProcess, close_all
from quire.foundation.processes.launch import LaunchConfig, Report, StatusReport
from quire.foundation.processes.orders import Order
from quire.foundation.processes.pipe_lines import LineReader, LineWriter, decoded

_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


class Child(Protocol):
    """A process that was started. `report_fd` is readable when it has reported something, and `pid_fd` when it is gone.
    `failure` is its last report, if it failed."""

    name: str
    failure: StatusReport | None
    report_fd: int
    pid_fd: int

    @property
    def pid(self) -> int: ...

    def reports(self) -> list[Report]:
        """Reports since the last call."""
        ...

    def tell(self, order: Order) -> None:
        """Give it an order, if it takes any."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        ...

    def kill(self, why: str = "") -> None:
        """End it at once; `why` becomes the cause of its death."""
        ...

    def exit_code(self) -> int | None:
        """The code as in subprocess: None while it runs, negative if a signal ended it."""
        ...

    def cause_of_death(self) -> str:
        """Wait for its end; returns why it is gone, in one line without a full stop."""
        ...

    def close(self) -> None:
        """Close the descriptors."""
        ...


class ChildProcess:
    """A running `python -m module`; see Child for its attributes and methods.

    `output` is the descriptor for what it prints; None for this process's own output. `begun` is a process of this
    module that was begun before its configuration was known, which inherits no descriptors; None begins one.
    """

    def __init__(
        self,
        name: str,
        module: str,
        launch: LaunchConfig,
        output: int | None = None,
        begun: BegunProcess | None = None,
    ) -> None:
        self.name = name
        orders_read, orders_write = os.pipe() if launch.takes_orders else (-1, -1)
        launch = msgspec.structs.replace(launch, orders_fd=orders_read)
        begun = begun or BegunProcess(module, launch.inherited_fds, output)
        self._process, self.report_fd, self._lifeline = begun.process, begun.report_read, begun.lifeline
        self.pid_fd = os.pidfd_open(self._process.pid)
        close_all(orders_read)
        launching = LineWriter(begun.launch_write)
        launching.send(msgspec.json.encode(launch))
        launching.end()
        self._reports = LineReader(self.report_fd)
        self._orders = LineWriter(orders_write) if launch.takes_orders else None
        self._killed_for = ""
        self._closed = False
        self.failure: StatusReport | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def reports(self) -> list[Report]:
        """Reports since the last call. A report that cannot be read is logged and left out."""
        if self._closed:
            return []
        reports = decoded(self._reports.read(), _decoder, f"A report of the {self.name} process")
        for report in reports:
            if isinstance(report, StatusReport) and report.state == "failed":
                self.failure = report
        return reports

    def tell(self, order: Order) -> None:
        if self._orders is not None:
            self._orders.send(msgspec.json.encode(order))

    def signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self, why: str = "") -> None:
        """End it at once, with what it has started in its session, such as compilers."""
        self._killed_for = why
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def exit_code(self) -> int | None:
        return self._process.poll()

    def cause_of_death(self) -> str:
        """Why it is gone: what it reported, or else its signal or exit code."""
        self.reports()
        if self.failure is not None:
            return self.failure.message.rstrip(".")
        code = self._process.wait()
        if self._killed_for and code == -signal.SIGKILL:
            return self._killed_for.rstrip(".")
        if code < 0:
            hint = " (out of memory? see the kernel's log)" if code == -signal.SIGKILL else ""
            return f"it was ended by {signal.Signals(-code).name}{hint}"
        return f"it exited with code {code}"

    def close(self) -> None:
        """Close the descriptors. A child that still runs exits, because its lifeline is closed."""
        if self._closed:
            return
        self._closed = True
        self._reports.close()
        close_all(self.pid_fd, self._lifeline)
        if self._orders is not None:
            self._orders.close()


def process_state(pid: int) -> str:
    """The state's letter as in proc(5) (T: stopped); empty without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""
