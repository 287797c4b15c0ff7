"""`quire serve` as users start it: real processes on a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx

from tests.e2e.process_usage import children_of, command_line

START_S = 180


class QuireServe:
    """One `quire serve`; a context that ends it.

    Attributes:
        url: Where it listens, once it is ready.
    """

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        command: Sequence[str] = ("quire.cli.main", "serve"),
    ) -> None:
        self._state = tempfile.TemporaryDirectory()  # its store is not the user's
        self._lines: list[str] = []
        self._arrived = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "XDG_STATE_HOME": self._state.name, **(environment or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def wait_ready(self) -> QuireServe:
        """Until it says its address."""
        line = self.wait_line(r"OpenAI clients\s+(\S+)/v1")
        match = re.search(r"(http\S+)/v1", line)
        assert match
        self.url = match[1].replace("localhost", "127.0.0.1")
        return self

    def wait_line(self, pattern: str, since: int = 0) -> str:
        """The first line that matches, of those behind the first `since`: what a process has printed need not be read
        here yet."""
        deadline, seen = time.monotonic() + START_S, since
        with self._arrived:
            while True:
                for line in self._lines[seen:]:
                    if re.search(pattern, line):
                        return line
                seen = len(self._lines)
                if not self._reader.is_alive() or time.monotonic() > deadline:
                    raise AssertionError(f"no line {pattern!r} in:\n{self.log}")
                self._arrived.wait(0.2)

    @property
    def line_count(self) -> int:
        """How many lines it printed so far."""
        return len(self._lines)

    def lines_since(self, count: int) -> list[str]:
        """What it printed after the first `count` lines, so far."""
        return self._lines[count:]

    @property
    def log(self) -> str:
        """Everything it printed so far."""
        return "\n".join(self._lines)

    @property
    def last_line(self) -> str:
        """The last line it printed."""
        self._reader.join(10)  # where nobody has waited for its end
        return self._lines[-1]

    def children(self) -> dict[str, int]:
        """Process ids of its children, by `engine` and `api`; of several engines the last one."""
        return {kind: pids[-1] for kind, pids in self.all_children().items()}

    def all_children(self) -> dict[str, list[int]]:
        """The same of all, in the order in which they were started."""
        found: dict[str, list[int]] = {}
        for pid in children_of(self.process.pid):
            words = command_line(pid)
            if "--launch-fd" in words:  # else it is about to become another program, or gone
                found.setdefault("engine" if "engine" in words[2] else "api", []).append(pid)
        return found

    def wait(self, timeout: float = 120) -> int:
        """Its exit code, once all that it printed is read."""
        code = self.process.wait(timeout)
        self._reader.join(10)
        return code

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A request with a JSON body."""
        return httpx.post(self.url + path, json=body, timeout=180, **options)

    def counts(self) -> dict[str, Any]:
        """What API process and engine hold (in developer mode), once there is an engine: the last answer to those who
        wait may be that theirs has died."""
        deadline = time.monotonic() + START_S
        while (answer := httpx.get(self.url + "/debug/counts", timeout=60)).status_code == 503:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.05)
        counts: dict[str, Any] = answer.json()
        return counts

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._arrived:
                self._lines.append(line.rstrip("\n"))
                self._arrived.notify_all()

    def __enter__(self) -> QuireServe:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._state.cleanup()


def stream_lines(url: str, body: dict[str, Any], timeout: float = 60) -> Sequence[str]:
    """All `data:` payloads of a streamed request."""
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=timeout) as response:
        return [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
