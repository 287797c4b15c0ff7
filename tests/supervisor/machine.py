"""A machine on which a supervisor's processes do what a test says: none is really started, and time is the test's."""

from __future__ import annotations

import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Dead, EngineId
from quire.foundation.processes.launch import LaunchConfig, Report, StatusReport
from quire.foundation.processes.orders import Order
from quire.serving.supervisor.process_host import Died, Event, ProcessHost, Reported, Signalled
from quire.serving.supervisor.supervisor import Supervisor
from tests.engine.test_client_liveness import ManualClock

DEADLINE_S = 3_600.0


class FakeChild:
    """A process that does what the test says."""

    report_fd = pid_fd = -1

    def __init__(self, name: str, launch: LaunchConfig, pid: int, on_signal: Callable[[FakeChild, int], None]) -> None:
        self.name = name
        self.launch = launch
        self.pid = pid
        self.failure: StatusReport | None = None
        self.signals: list[int] = []
        self.code: int | None = None
        self.killed_for = ""
        self.closed = 0
        self.orders: list[Order] = []
        self._on_signal = on_signal

    def reports(self) -> list[Report]:
        return []

    def tell(self, order: Order) -> None:
        self.orders.append(order)

    def signal(self, number: signal.Signals) -> None:
        if self.code is None:
            self.signals.append(number)
            self._on_signal(self, number)

    def kill(self, why: str = "") -> None:
        self.killed_for = self.killed_for or why
        self.signal(signal.SIGKILL)

    def exit_code(self) -> int | None:
        return self.code

    def cause_of_death(self) -> str:
        return self.killed_for or f"it exited with code {self.code}"

    def close(self) -> None:
        self.closed += 1


class Machine:
    """Where the processes of one supervisor run. Time passes while it waits.

    Attributes:
        children: All that were started, in this order.
        told: What clients and engines were told about deaths.
    """

    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock()
        self.children: list[FakeChild] = []
        self.told: list[tuple[str, Any]] = []
        self.forgotten: list[FakeChild] = []
        self.obedient = True  # processes end when they are told to
        self._events: deque[Event] = deque()
        self._script: Iterator[None] = iter(())
        self._listener = socket.socket()
        host = ProcessHost(
            start=self._start,
            events=lambda: self,
            notices=lambda directory: self,
            in_flight=lambda directory, engine: self.in_flight,
            state=lambda pid: "S",
        )
        self.in_flight: list[int] = []
        config = Config().with_values(**settings)
        self._supervisor = Supervisor(config, self._listener, developer_mode=False, clock=self.clock, host=host)

    def run(self, script: Iterator[None]) -> int:
        """The exit code of a supervisor to which this happens; the script goes on whenever it waits, once a tick."""
        self._script = script
        with self._listener:
            return self._supervisor.run()

    # --- what happens -----------------------------------------------------------------------------------------------

    def latest(self, name: str) -> FakeChild:
        return [child for child in self.children if child.name == name][-1]

    def ready(self, *names: str) -> None:
        """They say so."""
        self._events += [Reported(self.latest(name), StatusReport("ready")) for name in names]  # type: ignore[arg-type]

    def report(self, name: str, report: Report) -> None:
        self._events.append(Reported(self.latest(name), report))  # type: ignore[arg-type]

    def die(self, name: str, code: int = -9) -> None:
        self._end(self.latest(name), code)

    def interrupt(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._events.append(Signalled(number))

    # --- what the supervisor sees -----------------------------------------------------------------------------------

    def watch(self, child: FakeChild) -> None:
        pass

    def forget(self, child: FakeChild) -> None:
        self.forgotten.append(child)

    def wait(self, timeout: float | None) -> Iterator[Event]:
        if not self._events:
            next(self._script, None)
        if not self._events:
            assert timeout is not None
            self.clock.time += timeout
            assert self.clock.time < DEADLINE_S, "it does not come to an end"
        while self._events:
            yield self._events.popleft()

    def engine_died(self, client: int, message: Dead) -> None:
        self.told.append((f"client {client}", message))

    def client_died(self, engine: EngineId, client: int) -> None:
        self.told.append((f"engine {engine.epoch}", client))

    def close(self) -> None:
        pass

    def _start(self, name: str, module: str, launch: LaunchConfig) -> FakeChild:
        child = FakeChild(name, launch, len(self.children) + 1, self._signalled)
        self.children.append(child)
        return child

    def _signalled(self, child: FakeChild, number: int) -> None:
        if number == signal.SIGKILL:
            self._end(child, -number)
        elif self.obedient:
            self._end(child, 0)

    def _end(self, child: FakeChild, code: int) -> None:
        child.code = code
        self._events.append(Died(child))  # type: ignore[arg-type]
