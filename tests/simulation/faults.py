"""Faults at random times, of the kinds that a run has: each is planted, and what it may excuse is noted."""

from __future__ import annotations

import signal
from collections.abc import Callable

import msgspec

from quire.serving.supervisor.watchdog import TICK_S
from tests.simulation.judge import Excuses
from tests.simulation.network import Connection
from tests.simulation.processes import SimulatedProcess
from tests.simulation.server import Server
from tests.simulation.world import World

SHORT_S, LONG_S = 0.8, 40.0
"""How long a process may stand still without being replaced, and for how long it surely is."""
GRACE_S = 30.0
"""Between two jumps of the clock: each may add up with what happens then."""
WHILE_RECOVERING = 0.1
"""Of the faults that would meet a server without an engine, how many do; else it would hardly ever have one."""


class Faults:
    """Plants faults in a server.

    Args:
        server: What they are planted in.
        excuses: What they explain.
    """

    def __init__(self, server: Server, excuses: Excuses) -> None:
        self._server = server
        self._world: World = server.world
        self._excuses = excuses
        self._rng = server.world.random("faults")
        self._settings = server.settings
        self._last_jump = float("-inf")
        self._stopped = False
        self.planted: dict[str, int] = {}
        self._kinds: dict[str, Callable[[], bool]] = {
            "engine killed": self._kill_engine,
            "engine killed in a turn": self._kill_engine_in_a_turn,
            "engine raises": self._raise_in_engine,
            "engine stopped": lambda: self._hold(self._server.engine_process, SHORT_S, stopped=True),
            "engine stopped for long": lambda: self._hold(self._server.engine_process, LONG_S, stopped=True),
            "engine hangs": lambda: self._hold(self._server.engine_process, LONG_S),
            "step hangs": self._hang_step,
            "slow step": self._slow_step,
            "row breaks": self._break_row,
            "engine start fails": self._fail_start,
            "api killed": self._kill_api,
            "api stopped": lambda: self._hold(self._server.api_process, SHORT_S, stopped=True),
            "api stopped for long": lambda: self._hold(self._server.api_process, LONG_S, stopped=True),
            "api hangs": lambda: self._hold(self._server.api_process, 18.0),
            "api hangs for long": lambda: self._hold(self._server.api_process, LONG_S),
            "message corrupted": self._corrupt,
            "network slow": self._slow_network,
            "clock jumps": self._jump,
            "two deaths": self._kill_twice,
        }
        self._next()

    def stop(self) -> None:
        """No more are planted; those that last go on."""
        self._stopped = True

    def _next(self) -> None:
        if self._settings.faults:
            self._world.after(self._rng.expovariate(1 / self._settings.fault_s), self._plant)

    def _plant(self) -> None:
        if self._stopped:
            return
        if len(self._server.engines) > 1:
            self._server.target = self._rng.randrange(len(self._server.engines))
        kind, recovering = self._rng.choice(self._settings.faults), self._server.engine.core is None
        passes = recovering and self._rng.random() > WHILE_RECOVERING
        if self._server.is_up and not passes and self._kinds[kind]():
            self._world.say(f"FAULT {kind}")
            self.planted[kind] = self.planted.get(kind, 0) + 1
            self._server.disturbed()
        self._next()

    # --- the engine -------------------------------------------------------------------------------------------------

    def _kill_engine(self) -> bool:
        if self._server.engine_process.dead:
            return False
        self._server.engine_process.signal(signal.SIGKILL)
        return True

    def _kill_engine_in_a_turn(self) -> bool:
        self._server.engine.die_after(self._rng.randrange(12))
        return True

    def _raise_in_engine(self) -> bool:
        self._server.engine.faults.raises = self._rng.choice(("submit", "collect"))
        return True

    def _hang_step(self) -> bool:
        self._server.engine_process.guilty = True
        self._server.engine.faults.hangs = True
        return True

    def _slow_step(self) -> bool:
        self._server.engine.faults.slow_s = self._rng.uniform(0.1, 1.0)
        return True

    def _break_row(self) -> bool:
        if self._server.engine.faults.breaks_row:
            return False
        self._excuses.broken_rows += 1
        self._server.engine.faults.breaks_row = True
        return True

    def _fail_start(self) -> bool:
        self._server.next_start_fails = self._rng.randint(1, 3)
        return self._kill_engine()

    def _kill_twice(self) -> bool:
        """The next engine dies as well, soon after its start."""
        self._server.next_engine_dies_after = self._rng.randrange(60)
        return self._kill_engine()

    # --- any process ------------------------------------------------------------------------------------------------

    def _hold(self, process: SimulatedProcess, most: float, *, stopped: bool = False) -> bool:
        """It gets no time for a while."""
        if self._server.held or process.dead:
            return False
        seconds = self._rng.uniform(0.05, most)
        if seconds > SHORT_S or self._world.now() - process.held_until < TICK_S:  # who looks now and then sees one
            process.guilty = True
        process.held_until = self._world.now() + seconds
        if process is self._server.api_process and seconds > 10.0:
            self._excuses.aborts.append(self._world.now() + seconds - 1e-3)
        self._server.hold(process, seconds, stopped=stopped)
        return True

    def _kill_api(self) -> bool:
        if self._server.api_process.dead:
            return False
        self._server.api_process.signal(signal.SIGKILL)
        return True

    # --- everything else --------------------------------------------------------------------------------------------

    def _corrupt(self) -> bool:
        """Something that is on its way does not decode. Who waits for an answer can still be read."""
        on_the_way = [
            (connection, place)
            for connection in self._server.network.connections()
            for place in range(connection.num_on_the_way)
            if _kind(connection, place) in ("Add", "Deltas", "Heartbeat")
        ]
        if not on_the_way:
            return False
        connection, place = self._rng.choice(on_the_way)
        if _kind(connection, place) == "Add":
            self._excuses.errors.append(self._world.now())  # the others are excused when the message is seen
        fields = msgspec.msgpack.decode(connection.peek(place))
        fields[2 if fields[0] == "Add" else 1] = {"not": "expected"}
        connection.replace(place, msgspec.msgpack.encode(fields))
        return True

    def _slow_network(self) -> bool:
        network = self._server.network
        network.slowness = self._rng.choice((10.0, 100.0))

        def recover() -> None:
            network.slowness = 1.0

        self._world.after(self._rng.uniform(0.1, 5.0), recover)
        return True

    def _jump(self) -> bool:
        if self._world.now() < self._last_jump + GRACE_S:
            return False
        seconds = self._rng.choice((0.5, 3.0, 30.0, 3_600.0))
        self._last_jump = self._world.now() + seconds
        self._world.jump(seconds)
        self._server.jumped()
        return True


def _kind(connection: Connection, place: int) -> str:
    """The type of a message."""
    return str(msgspec.msgpack.decode(connection.peek(place))[0])
