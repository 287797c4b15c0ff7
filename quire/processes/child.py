"""What a child process is given and what it says back, on inherited descriptors.

The config travels as JSON through a pipe (multiprocessing's spawn would pickle it); reports come back as JSON lines on
another; a third, the lifeline, is held open by the parent: when it closes, the parent is gone and the child leaves too.
Used by the supervisor and by both kinds of children; knows nothing about what they do.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from quire.config import Config
from quire.errors import SETUP_ERRORS, QuireError, SetupError

ORPHANED = 75
"""Exit code of a child whose parent is gone."""
CRASHED = 70
"""Exit code of a process that failed in a way nobody foresaw."""


class Launch(msgspec.Struct, frozen=True):
    """Everything a child is told.

    Attributes:
        config: Resolved settings.
        directory: Private directory of the sockets.
        number: Which API process this is; 0 for the engine.
        listen_fd: Inherited listening socket, for API processes.
        developer_mode: Serve debug routes.
    """

    config: Config
    directory: str
    number: int = 0
    listen_fd: int = -1
    developer_mode: bool = False


class Report(msgspec.Struct, frozen=True):
    """What a child says of itself.

    Attributes:
        state: `ready` once; `failed` as the last thing.
        error: For `failed`: the class name in `quire.errors`, or empty for an unforeseen one.
        message: For `failed`: cause and next action, in one line.
        startup: For the engine's `ready`: seconds by stage.
        kv_tokens: For an API process's `ready`: tokens that the engine's KV cache holds, now that it is there.
    """

    state: Literal["ready", "failed"]
    error: str = ""
    message: str = ""
    startup: dict[str, float] = {}
    kv_tokens: int = 0


def run(main: Callable[[Launch, Callable[[Report], None]], None]) -> None:
    """Body of a child's `__main__`: read the launch, run `main`, report how it failed if it did, exit truthfully."""
    arguments = argparse.ArgumentParser()
    for name in ("launch-fd", "report-fd", "lifeline-fd"):
        arguments.add_argument(f"--{name}", type=int, required=True)
    fds = arguments.parse_args()
    with open(fds.launch_fd, "rb") as pipe:
        launch = msgspec.json.decode(pipe.read(), type=Launch)
    threading.Thread(target=_leave_with_parent, args=(fds.lifeline_fd,), daemon=True).start()

    def report(what: Report) -> None:
        os.write(fds.report_fd, msgspec.json.encode(what) + b"\n")

    try:
        main(launch, report)
    except SetupError as error:
        report(Report("failed", type(error).__name__, error.message))
        sys.exit(error.exit_code)
    except QuireError as error:
        report(Report("failed", "", error.message))
        sys.exit(CRASHED)
    except Exception as error:
        traceback.print_exc()
        report(Report("failed", "", one_line(error)))
        sys.exit(CRASHED)


def one_line(error: BaseException) -> str:
    """An unforeseen error with the place it came from: `ValueError: … (file.py:12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def raise_failure(report: Report) -> None:
    """Raise a child's failure in its parent.

    Raises:
        SetupError: Of the class that the child named.
    """
    raise SETUP_ERRORS.get(report.error, SetupError)(report.message)


def _leave_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the parent's end is closed; nothing is ever written
    os._exit(ORPHANED)
