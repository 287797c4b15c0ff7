"""What a test starts: it reports how it was launched, and each model that it is told to open until one has no name."""

from __future__ import annotations

import os
import sys

from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.launch import LaunchConfig, Report, SendReport, SwapRequest
from quire.foundation.processes.orders import OpenModel, read_orders
from quire.foundation.processes.pipe_lines import LineReader, wait_readable


def main(launch: LaunchConfig, report: SendReport) -> None:
    """Repeat."""
    if launch.developer_mode:  # a line that is no report
        os.write(_report_fd(), b"{broken\n")
    report(_repeated(launch))
    orders = LineReader(launch.orders_fd)
    while True:
        wait_readable(orders.fd)
        for order in read_orders(orders):
            assert isinstance(order, OpenModel)
            if not order.launch.config.model.model:
                return
            report(_repeated(order.launch))


def _repeated(launch: LaunchConfig) -> Report:
    return SwapRequest(launch.config, launch.config, "beside", 0.0, 0.0)


def _report_fd() -> int:
    return int(sys.argv[sys.argv.index("--report-fd") + 1])


if __name__ == "__main__":
    run_child(main)
