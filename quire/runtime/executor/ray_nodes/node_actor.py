"""The actor that Ray runs on another node: starts the follower there as a child process, and reports what it says.

The child ends with the actor, even if that is killed, because its lifeline closes. Imports no Ray.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from contextlib import suppress
from typing import NamedTuple

import msgspec

from quire.foundation.config import environment
from quire.foundation.processes.child_process import ChildProcess
from quire.foundation.processes.launch import LaunchConfig, StatusReport

FOLLOWER = "quire.cli.ray_node"
"""The module that the child runs."""
_MAX_LINES = 10_000
_TAKE = 100


class News(NamedTuple):
    """What a follower has printed and become since the last news.

    Attributes:
        host: The machine's name.
        lines: The lines that the follower has printed.
        is_ready: Whether its settings were found good, and it joins the head.
        exit_code: None while it runs.
        cause: Why it is gone, without a full stop.
        error: The class of the SetupError that was the cause; empty: something else was.
    """

    host: str
    lines: list[str]
    is_ready: bool = False
    exit_code: int | None = None
    cause: str = ""
    error: str = ""


class NodeActor:
    """Starts a follower as a child process on the node where Ray runs this actor, and reports what it says.

    Args:
        launch: The follower's LaunchConfig, as JSON.
        key: The key that nodes share. It is an argument, because Ray shows and logs the variables of an actor.
        module: The module that the child runs.
    """

    def __init__(self, launch: bytes, key: bytes, module: str = FOLLOWER) -> None:
        environment.share_node_key(key)
        environment.leave_threads_open()
        self._host = socket.gethostname()
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_LINES)
        output, theirs = os.pipe()
        self._child = ChildProcess("node", module, msgspec.json.decode(launch, type=LaunchConfig), theirs)
        os.close(theirs)
        self._is_ready = False
        threading.Thread(target=self._read, args=(output,), daemon=True).start()

    def news(self, wait_s: float) -> News:
        """Wait `wait_s` seconds at most for something new. A follower that is gone has no more news."""
        was_gone = self._child.exit_code() is not None  # before: else what it says and prints last could come between
        lines, ended = self._new_lines(wait_s)
        for report in self._child.reports():
            if isinstance(report, StatusReport) and report.state == "ready":
                self._is_ready = True
        if not ended and (lines or not was_gone):
            return News(self._host, lines, self._is_ready)
        cause = self._child.cause_of_death()
        failure = self._child.failure
        return News(
            self._host, lines, self._is_ready, self._child.exit_code(), cause, "" if failure is None else failure.error
        )

    def _new_lines(self, wait_s: float) -> tuple[list[str], bool]:
        """New lines, and whether they are the last ones."""
        lines: list[str] = []
        with suppress(queue.Empty):
            line = self._lines.get(timeout=wait_s)
            while line is not None:
                lines.append(line)
                if len(lines) == _TAKE:
                    return lines, False
                line = self._lines.get_nowait()
            return lines, True
        return lines, False

    def _read(self, output: int) -> None:
        """Read the child's output until the child, and all that it has started, are gone."""
        with open(output, encoding="utf-8", errors="replace") as pipe:
            for line in pipe:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)
