"""A child process that runs before anybody knows what it is to do. A start begins with it, so this imports little."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


class BegunProcess:
    """A running `python -m module` that has no launch configuration yet: it can import what it needs meanwhile, and
    ends if it gets none. `inherited` are the descriptors that it inherits."""

    def __init__(self, module: str, inherited: Sequence[int] = (), output: int | None = None) -> None:
        self.module = module
        launch_read, self.launch_write = os.pipe()
        self.report_read, report_write = os.pipe()
        lifeline_read, self.lifeline = os.pipe()
        command = [sys.executable, "-m", module]
        command += ["--launch-fd", str(launch_read), "--report-fd", str(report_write)]
        command += ["--lifeline-fd", str(lifeline_read)]
        # A session of its own: Ctrl-C reaches the supervisor alone, which then drains in order.
        self.process = subprocess.Popen(
            command,
            pass_fds=[launch_read, report_write, lifeline_read, *inherited],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        close_all(launch_read, report_write, lifeline_read)

    def end(self) -> None:
        """End it at once, if nothing was made of it."""
        self.process.kill()
        self.process.wait()
        close_all(self.launch_write, self.report_read, self.lifeline)


def close_all(*descriptors: int) -> None:
    """Close descriptors; negative ones stand for none."""
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)
