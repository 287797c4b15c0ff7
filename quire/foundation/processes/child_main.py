"""The child's side: read the launch configuration, run, report failures, exit with the matching code.

The parent (`child_process.py`) hands over three descriptors. The configuration comes as JSON through a pipe
(multiprocessing's spawn would pickle it), status reports go back as JSON lines through another. The third, the
lifeline, is held open by the parent: when it closes, the parent is gone and the child exits.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from quire.errors import SETUP_ERRORS, QuireError, SetupError
from quire.foundation.processes.launch import (
    EXIT_CRASHED,
    EXIT_ORPHANED,
    LaunchConfig,
    Report,
    SendReport,
    StatusReport,
)
from quire.foundation.processes.logs import set_up_logs
from quire.foundation.processes.pipe_lines import LineWriter

logger = logging.getLogger(__name__)
FLUSH_S = 5.0
"""How long a process that ends waits for its last reports to be read, in seconds."""

Main = Callable[[LaunchConfig, SendReport], None]
"""What a child does, given its configuration and a function that sends a report."""


def run_child(main: Main, process: str = "child") -> None:
    """Body of a child's `__main__`: run `main`; if it fails, report why and exit with the error's code.

    A failed process ends at once: what it holds may be broken, and threads may be stuck in it.

    Args:
        process: What it is called in logs.
    """
    arguments = argparse.ArgumentParser()
    for name in ("launch-fd", "report-fd", "lifeline-fd"):
        arguments.add_argument(f"--{name}", type=int, required=True)
    fds = arguments.parse_args()
    with open(fds.launch_fd, "rb") as pipe:
        launch = msgspec.json.decode(pipe.read(), type=LaunchConfig)
    _set_up_logs(launch, process)
    threading.Thread(target=_exit_with_parent, args=(fds.lifeline_fd,), daemon=True).start()

    reports = LineWriter(fds.report_fd)

    def report(report: Report) -> None:
        reports.send(msgspec.json.encode(report))

    try:
        main(launch, report)
        reports.flush(FLUSH_S)
    except SetupError as error:
        report(StatusReport("failed", type(error).__name__, error.message))
        _end(error.exit_code, reports)
    except QuireError as error:
        report(StatusReport("failed", "", error.message))
        _end(EXIT_CRASHED, reports)
    except Exception as error:
        logger.exception("This process ends, because of an unexpected error.")
        report(StatusReport("failed", "", one_line_error(error)))
        _end(EXIT_CRASHED, reports)


def _set_up_logs(launch: LaunchConfig, process: str) -> None:
    """What all ranks of an engine have to say, the first one says."""
    format, rank = launch.config.observability.log_format, launch.rank
    if rank is None:
        set_up_logs(format, process)
        return
    own_level = logging.INFO if rank.rank == 0 else logging.WARNING
    set_up_logs(format, f"{process} {rank.rank}", prefix=f"rank {rank.rank}: ", own_level=own_level)


def _end(code: int, reports: LineWriter) -> NoReturn:
    reports.flush(FLUSH_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def one_line_error(error: BaseException) -> str:
    """An unexpected error and where it was raised: `ValueError: … (file.py:12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def raise_reported_failure(report: StatusReport) -> None:
    """Raise a child's failure in its parent.

    Raises:
        SetupError: Of the class that the report names.
    """
    raise SETUP_ERRORS.get(report.error, SetupError)(report.message)


def _exit_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the parent's end is closed; nothing is ever written
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with what this process has started, such as compilers
    os._exit(EXIT_ORPHANED)


def do_not_interrupt_others() -> None:
    """Let this thread, and those that it will start, wait until a processor is free or a turn is over, instead of
    interrupting who computes (SCHED_BATCH, see sched(7)).

    A step's kernels share their work out in pieces: a thread that is interrupted within a piece keeps all others
    waiting for as long as the interruption takes. Where a processor is idle, nothing changes.
    """
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
