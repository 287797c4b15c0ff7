"""The child's side: read the launch configuration, run, report failures, exit with the matching code.

The parent (`child_process.py`) hands over three descriptors. The configuration comes as JSON through a pipe, because
multiprocessing's spawn would pickle it, and reports go back as JSON lines through another. The parent holds the third,
the lifeline, open: when it closes, the parent is gone and the child exits.
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
"""Seconds that a process that ends waits for its last reports to be read."""

Main = Callable[[LaunchConfig, SendReport], None]
"""What a child does, given its configuration and a function that sends reports."""


def run_child(main: Main, process: str = "child") -> None:
    """Run `main` as the body of a child's `__main__`; if it fails, report why and exit with the error's code.

    A failed process ends at once, because what it holds may be broken, and threads may be stuck in it. `process` is its
    name in logs.
    """
    arguments = argparse.ArgumentParser()
    for name in ("launch-fd", "report-fd", "lifeline-fd"):
        arguments.add_argument(f"--{name}", type=int, required=True)
    fds = arguments.parse_args()
    with open(fds.launch_fd, "rb") as pipe:
        given = pipe.read()
    if not given:  # the parent has ended before it knew what to launch
        sys.exit(EXIT_ORPHANED)
    launch = msgspec.json.decode(given, type=LaunchConfig)
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
    """Log at a level by which only the first rank of an engine says what all ranks have to say."""
    format, rank, file = launch.config.observability.log_format, launch.rank, launch.config.server.log_config_file
    if rank is None:
        set_up_logs(format, process, config_file=file)
        return
    own_level = logging.INFO if rank.rank == 0 else logging.WARNING
    set_up_logs(format, f"{process} {rank.rank}", prefix=f"rank {rank.rank}: ", own_level=own_level, config_file=file)


def _end(code: int, reports: LineWriter) -> NoReturn:
    reports.flush(FLUSH_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def one_line_error(error: BaseException) -> str:
    """An unexpected error and where it was raised, as `ValueError: … (file.py:12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def raise_reported_failure(report: StatusReport) -> None:
    """Raise a child's failure in its parent, as the SetupError that the report names."""
    raise SETUP_ERRORS.get(report.error, SetupError)(report.message)


def _exit_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the parent's end is closed: nothing is ever written
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # and what this process has started, such as compilers
    os._exit(EXIT_ORPHANED)


def do_not_interrupt_others() -> None:
    """Let this thread, and those that it will start, wait for a free processor or the end of a turn instead of
    interrupting a thread that computes (SCHED_BATCH, see sched(7)).

    A step's kernels divide their work into pieces. A thread that is interrupted within a piece keeps all others waiting
    until it goes on. If a processor is idle, nothing changes.
    """
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
