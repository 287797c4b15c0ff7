"""Simulated processes as a supervisor sees them: they report, are signalled, and die.

What they do is in `engine_process.py` and `api_process.py`.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from quire.engine.client import client_address, engine_address
from quire.engine.flight_record import requests_in_flight
from quire.foundation.messages.from_engine import Dead, EngineId
from quire.foundation.messages.to_engine import ClientGone
from quire.foundation.processes.launch import LaunchConfig, Report, StatusReport
from quire.foundation.processes.orders import Order
from quire.serving.supervisor.process_host import Died, Event, ProcessHost, Reported, Signalled
from tests.simulation.blocking import BlockingThread
from tests.simulation.network import Connection, Network
from tests.simulation.world import World

LINGER_S = 0.5
"""How long a notice waits for an engine that does not listen yet."""


class SupervisorEvents:
    """What the supervisor waits for; see ProcessEvents.

    Args:
        world: Gives the time.
        thread: Of the supervisor.
    """

    def __init__(self, world: World, thread: BlockingThread) -> None:
        self._world = world
        self._thread = thread
        self._events: deque[Event] = deque()

    def put(self, event: Event) -> None:
        """Something happens."""
        self._events.append(event)
        self._thread.wake()

    def signal(self, number: signal.Signals) -> None:
        """A signal to the supervisor."""
        self.put(Signalled(number))

    def watch(self, child: object) -> None:
        pass  # every child reports here

    def forget(self, child: object) -> None:
        pass  # what it says is heard, and means nothing

    def wait(self, timeout: float | None) -> Iterator[Event]:
        deadline = None if timeout is None else self._world.now() + timeout
        while not self._events:
            left = None if deadline is None else deadline - self._world.now()
            if left is not None and left <= 0:
                return
            self._thread.wait(left)
        for _ in range(len(self._events)):
            if self._events:  # who handles one of them may wait for others
                yield self._events.popleft()

    def close(self) -> None:
        self._events.clear()


class ProcessDuties(Protocol):
    """What a process does when its life is interfered with."""

    def stop_threads(self) -> None:
        """It is dead: nothing of it runs any more."""

    def hold(self) -> None:
        """It gets no time."""

    def release(self) -> None:
        """It gets time again."""

    def handle_signal(self, number: signal.Signals) -> bool:
        """A signal arrives; whether it is handled."""


class SimulatedProcess:
    """A Child. What it does is up to its duties.

    Attributes:
        guilty: Whether a fault was planted that may make it look stuck.
        held_until: When it last got no time, the end of it.
        was_ready: Whether it has said that it is ready.
        on_exit: Called at its end.
        dead: Whether it is gone. What it says from then on is lost.
        stopped: Whether it was stopped (SIGSTOP).
    """

    report_fd = pid_fd = -1

    def __init__(self, world: World, network: Network, events: SupervisorEvents, name: str, pid: int) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.pid = pid
        self.failure: StatusReport | None = None
        self.guilty = self.was_ready = self.dead = self.stopped = False
        self.held_until = -math.inf
        self.on_exit: Callable[[], None] = lambda: None
        self._events = events
        self._code: int | None = None
        self._killed_for = ""
        self._duties: ProcessDuties | None = None

    def begin(self, duties: ProcessDuties) -> None:
        """What it does."""
        self._duties = duties

    # --- for itself -------------------------------------------------------------------------------------------------

    def connect(self, address: str) -> Connection:
        """A socket of its own."""
        connection = self.network.connect(self, address)
        if self.dead:
            self.network.forget(connection)
        return connection

    def report(self, report: Report) -> None:
        """Tell the supervisor."""
        if self.dead:
            return
        if isinstance(report, StatusReport):
            self.world.say(f"{self.name} {self.pid} is {report.state} {report.message}")
            self.was_ready = self.was_ready or report.state == "ready"
            if report.state == "failed":
                self.failure = report
            elif self.name.startswith("engine"):
                self.network.engine_is_ready()
        self._events.put(Reported(self, report))

    def exit(self, code: int) -> None:
        """It ends."""
        if self.dead:
            return
        self.world.say(f"{self.name} {self.pid} ends with {code}")
        self.dead, self._code = True, code
        self.network.drop(self)
        self._events.put(Died(self))
        if self._duties is not None:
            self._duties.stop_threads()
        self.on_exit()

    # --- for who interferes -----------------------------------------------------------------------------------------

    def hold(self, *, stopped: bool = False) -> None:
        """It gets no time from now on."""
        self.stopped = self.stopped or stopped
        if self._duties is not None and not self.dead:
            self._duties.hold()

    def release(self) -> None:
        """It gets time again."""
        self.stopped = False
        if self._duties is not None and not self.dead:
            self._duties.release()

    # --- as a Child -------------------------------------------------------------------------------------------------

    def reports(self) -> list[Report]:
        return []  # they come as events

    def signal(self, number: signal.Signals) -> None:
        if self.dead:
            return
        if number == signal.SIGKILL or self._duties is None or not self._duties.handle_signal(number):
            self.exit(-number)

    def tell(self, order: Order) -> None:
        self.world.fail(f"{self.name} gets an order, and nobody has asked for another model: {order}")

    def kill(self, why: str = "") -> None:
        if why and not self.guilty and not self.dead:
            self.world.fail(f"{self.name} {self.pid} is killed without a reason: {why}")
        self._killed_for = why
        self.signal(signal.SIGKILL)

    def exit_code(self) -> int | None:
        return self._code

    def cause_of_death(self) -> str:
        if self.failure is not None:
            return self.failure.message
        return self._killed_for or f"it ended with {self._code}"

    def close(self) -> None:
        pass


class SimulatedNotices:
    """The supervisor's notices, see DeathNotices."""

    def __init__(self, world: World, network: Network, directory: Path) -> None:
        self._world = world
        self._network = network
        self._directory = directory
        self._clients: dict[tuple[int, int], Connection] = {}  # by client and engine

    def engine_died(self, client: int, message: Dead) -> None:
        way = client, message.source.engine
        if way not in self._clients:
            self._clients[way] = self._network.connect(self, client_address(self._directory, *way))
        self._world.say(f"client {client} is told that {message.source} is dead, {message.in_flight} in flight")
        self._clients[way].send(msgspec.msgpack.encode(message))

    def client_died(self, engine: EngineId, client: int) -> None:
        connection = self._network.connect(self, engine_address(self._directory, engine))
        connection.send(msgspec.msgpack.encode(ClientGone(client)))
        self._world.after(LINGER_S, lambda: self._network.forget(connection))

    def close(self) -> None:
        pass


def simulated_host(
    world: World,
    network: Network,
    events: SupervisorEvents,
    states: Callable[[int], str],
    start: Callable[[str, LaunchConfig], SimulatedProcess],
) -> ProcessHost:
    """The machine that simulated processes run on; the record of what was in flight is the real one."""
    return ProcessHost(
        start=lambda name, module, launch: start(name, launch),
        events=lambda: events,
        notices=lambda directory: SimulatedNotices(world, network, directory),
        in_flight=requests_in_flight,
        state=states,
    )
