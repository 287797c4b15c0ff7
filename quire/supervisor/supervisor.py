"""The supervisor: starts engine and API process, announces when they are ready, drains them, and exits with a code.

starting → ready → draining. A child that dies is noticed at once; the last line printed names it and the cause.
Restarting a dead engine and replaying its requests would begin in `_engine_died`.
"""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import tempfile
import time
from enum import Enum
from pathlib import Path

from quire.config import Config
from quire.engine.transport import report_death
from quire.errors import SETUP_ERRORS, SetupError
from quire.messages import EngineId
from quire.processes.child_process import ChildProcess
from quire.processes.launch import EXIT_CRASHED, LaunchConfig, StatusReport
from quire.supervisor.announce import announce_ready, print_log
from quire.supervisor.process_events import Died, Event, ProcessEvents, Reported, Signalled

STOP_TIMEOUT_S = 5.0
"""What a process gets to end after it was told to, in seconds, beyond the drain."""


class State(Enum):
    """What the processes are doing together."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Supervisor:
    """Runs one engine and one API process until told to stop or until one of them dies.

    Args:
        config: Resolved settings.
        listener: Bound and listening; the API process inherits it.
        developer_mode: Serve debug routes.
    """

    def __init__(self, config: Config, listener: socket.socket, developer_mode: bool) -> None:
        self._config = config
        self._listener = listener
        self._developer_mode = developer_mode
        self._state = State.STARTING
        self._started = time.monotonic()
        self._ready: set[str] = set()
        self._exit_code: int | None = None
        self._events = ProcessEvents()  # from here on signals are received
        self._startup: dict[str, float] = {}
        self._kv_tokens = 0

    def run(self) -> int:
        """Until the end; the exit code: 0 after a drain, the class of a failed start, 70 when a process died."""
        directory = Path(tempfile.mkdtemp(prefix="quire-"))  # readable by its owner only
        self._directory = directory
        self._listener.set_inheritable(True)
        launch = LaunchConfig(self._config, str(directory), developer_mode=self._developer_mode)
        self._engine = ChildProcess("engine", "quire.engine.start", launch)
        api = LaunchConfig(self._config, str(directory), 0, self._listener.fileno(), self._developer_mode)
        self._api = ChildProcess("api", "quire.api.api_server", api)
        try:
            for child in (self._engine, self._api):
                self._events.watch(child)
            while self._exit_code is None:
                for event in self._events.wait(None):
                    if self._exit_code is None:
                        self._handle(event)
        finally:
            self._end_children()
            self._events.close()
            shutil.rmtree(directory, ignore_errors=True)
        return self._exit_code

    def _handle(self, event: Event) -> None:
        match event:
            case Signalled(number):
                self._exit_code = self._drain(number)
            case Reported(child, report) if report.state == "ready":
                self._child_is_ready(child, report)
            case Died(child) if child is self._engine:
                self._exit_code = self._engine_died()
            case Died(child):
                self._exit_code = self._child_died(child)

    def _child_is_ready(self, child: ChildProcess, report: StatusReport) -> None:
        self._ready.add(child.name)
        if child is self._engine:
            self._startup = report.startup
        else:
            self._kv_tokens = report.kv_tokens
        if self._ready == {"engine", "api"}:
            self._state = State.READY
            took = time.monotonic() - self._started
            announce_ready(self._config, self._listener, took, self._startup, self._kv_tokens)

    def _engine_died(self) -> int:
        """Tell the API process, whose open streams get an error, and wait until it ends. Returns the exit code."""
        code = self._child_died(self._engine)
        report_death(self._directory, 0, EngineId(), self._engine.cause_of_death())
        self._wait_for(self._api, STOP_TIMEOUT_S)
        return code

    def _child_died(self, child: ChildProcess) -> int:
        failure = child.failure
        error = SETUP_ERRORS.get(failure.error, SetupError) if failure is not None else None
        if self._state is State.STARTING and failure is not None and error is not None:
            self._last_line = failure.message
            return error.exit_code if failure.error else EXIT_CRASHED
        told = "Requests in flight got an error" if child is self._engine else "Open connections were cut"
        self._last_line = f"{child.name} process died: {child.cause_of_death()}. {told}; start the server again."
        return EXIT_CRASHED

    def _drain(self, number: int) -> int:
        """New requests are refused, open ones finish within the time they get; a second signal ends all at once."""
        self._state = State.DRAINING
        timeout = self._config.server.shutdown_timeout
        print_log(
            f"{signal.Signals(number).name}: open requests get {timeout:g} s to finish; a second signal ends them now"
        )
        for child, patience in ((self._api, timeout + STOP_TIMEOUT_S), (self._engine, STOP_TIMEOUT_S)):
            child.signal(signal.SIGTERM)
            match self._wait_for(child, patience):
                case Signalled(again):
                    self._last_line = f"stopped at once by {signal.Signals(again).name}"
                    return 128 + again
                case Died():
                    return self._engine_died()
            stopped_early = child.name not in self._ready and child.exit_code() == -signal.SIGTERM
            if child.exit_code() != 0 and not stopped_early:
                self._last_line = f"{child.name} process did not end cleanly: {self._how_it_ended(child)}"
                return EXIT_CRASHED
        print_log("stopped")
        return 0

    def _how_it_ended(self, child: ChildProcess) -> str:
        return "it had to be killed" if child.exit_code() is None else child.cause_of_death()

    def _wait_for(self, child: ChildProcess, seconds: float) -> Signalled | Died | None:
        """Until the child is gone or the time is over, or something cuts this short, which is returned: a signal, or
        the death of the engine while the API process still needs it."""
        deadline = time.monotonic() + seconds
        while child.exit_code() is None and (left := deadline - time.monotonic()) > 0:
            for event in self._events.wait(left):
                match event:
                    case Signalled():
                        return event
                    case Died(other) if other is self._engine and child is self._api:
                        return event
        return None

    def _end_children(self) -> None:
        for child in (self._api, self._engine):
            child.signal(signal.SIGKILL)
            child.cause_of_death()
            child.close()
        if self._exit_code:
            print(f"quire: error: {' '.join(self._last_line.split())}", file=sys.stderr, flush=True)
