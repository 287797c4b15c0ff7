"""The parent's side: start a child by command line, receive its reports, see its death.

Launch configuration, orders, reports and death all go through file descriptors, so one selector watches everything.
Knows nothing about what the child does or what its death means.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from quire.foundation.processes.launch import LaunchConfig, Report, StatusReport
from quire.foundation.processes.orders import Order, OrderWriter
from quire.foundation.processes.pipe_lines import LineReader, LineWriter, decoded

logger = logging.getLogger(__name__)

_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


class ChildProcess:
    """A running `python -m module`.

    Args:
        name: See below.
        module: What it runs.
        launch: What it is told.
        output: Descriptor for what it prints; None: where this process prints.

    Attributes:
        name: For messages: `engine`, `api`.
        report_fd: Becomes readable when the child reports something.
        pid_fd: Becomes readable when the child is gone.
    """

    def __init__(self, name: str, module: str, launch: LaunchConfig, output: int | None = None) -> None:
        self.name = name
        launch_read, launch_write = os.pipe()
        self.report_fd, report_write = os.pipe()
        lifeline_read, self._lifeline = os.pipe()
        orders_read, orders_write = os.pipe() if launch.takes_orders else (-1, -1)
        launch = msgspec.structs.replace(launch, orders_fd=orders_read)
        inherited = [launch_read, report_write, lifeline_read, *launch.inherited_fds]
        command = [sys.executable, "-m", module]
        command += ["--launch-fd", str(launch_read), "--report-fd", str(report_write)]
        command += ["--lifeline-fd", str(lifeline_read)]
        # A session of its own: Ctrl-C reaches the supervisor alone, which then drains in order.
        self._process = subprocess.Popen(
            command, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        self.pid_fd = os.pidfd_open(self._process.pid)
        _close(launch_read, report_write, lifeline_read, orders_read)
        launching = LineWriter(launch_write)
        launching.send(msgspec.json.encode(launch))
        launching.end()
        self._reports = LineReader(self.report_fd)
        self._orders = OrderWriter(orders_write) if launch.takes_orders else None
        self._killed_for = ""
        self._closed = False
        self.failure: StatusReport | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def reports(self) -> list[Report]:
        """Reports since the last call. One that cannot be read is left out, and logged."""
        if self._closed:
            return []
        reports: list[Report] = []
        for report in decoded(self._reports.read(), _decoder):
            if isinstance(report, Exception):
                logger.error("A report of the %s process cannot be read, and is left out: %s.", self.name, report)
                continue
            reports.append(report)
            if isinstance(report, StatusReport) and report.state == "failed":
                self.failure = report
        return reports

    def tell(self, order: Order) -> None:
        """Give it an order, if it takes any."""
        if self._orders is not None:
            self._orders.send(order)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self, why: str = "") -> None:
        """End it at once, and what it has started in its session, such as compilers; `why` becomes the cause of its
        death."""
        self._killed_for = why
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def exit_code(self) -> int | None:
        """As subprocess has it: None while it runs, negative when a signal ended it."""
        return self._process.poll()

    def cause_of_death(self) -> str:
        """Why it is gone, in one line without a full stop: what it reported, else its signal or exit code."""
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
        """Close the descriptors; a child that still runs exits, because its lifeline is closed. More calls do
        nothing."""
        if self._closed:
            return
        self._closed = True
        self._reports.close()
        _close(self.pid_fd, self._lifeline)
        if self._orders is not None:
            self._orders.close()


def _close(*descriptors: int) -> None:
    """Close descriptors; negative ones stand for none."""
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)


def process_state(pid: int) -> str:
    """A letter, as proc(5) has it (T: stopped); empty where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""
