"""The processes of a server: which lives each has had, which are ready, and who is told when one is replaced.

Decides nothing. An engine that is replaced gets a new epoch, an API process a new number, so nothing that was meant for
the one before reaches the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.clock import Clock
from quire.config import Config
from quire.messages import Dead, EngineId
from quire.processes.child import Child
from quire.processes.launch import LaunchConfig, Pulse
from quire.supervisor.process_host import THIS_MACHINE, ProcessHost
from quire.supervisor.watchdog import Watchdog

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 10.0
"""Before a process is started again that died before it was ready; twice as long each time."""
_MAX_DOUBLINGS = 10
"""More make no difference, and no float."""


@dataclass(frozen=True)
class Modules:
    """What the processes run, as `python -m` takes it."""

    engine: str = "quire.engine.start"
    api: str = "quire.api.api_server"


MODULES = Modules()
"""Those of a server."""


class Children:
    """One engine and one API process, which run from the start.

    Args:
        config: Resolved settings.
        directory: Private, for sockets.
        listen_fd: The listening socket.
        developer_mode: Serve debug routes.
        modules: What they run.
        clock: For all times.
        host: Where they run.

    Attributes:
        engine, api: The present ones; an API process that is to be replaced may be dead.
        engine_died_at: When the last engine died.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        listen_fd: int,
        developer_mode: bool,
        modules: Modules,
        clock: Clock,
        host: ProcessHost = THIS_MACHINE,
    ) -> None:
        self._config = config
        self._directory = directory
        self._listen_fd = listen_fd
        self._developer_mode = developer_mode
        self._modules = modules
        self._clock = clock
        self._host = host
        self._notices = host.notices(directory)
        self._id = EngineId()
        self._number = 0
        self._was_ready: set[str] = set()
        self._ready: set[Child] = set()
        self._due: dict[str, float] = {}  # by name: when it is started again
        self._early_deaths = {"engine": 0, "api": 0}
        self._started: list[Child] = []
        self._watchdogs: dict[Child, Watchdog] = {}
        self.engine_died_at = 0.0
        self.engine = self._start_engine()
        self.api = self._start_api()
        self._started.clear()

    def __iter__(self) -> Iterator[Child]:
        return iter((self.engine, self.api))

    # --- what is known of them --------------------------------------------------------------------------------------

    def ready(self, child: Child) -> None:
        """It said that it is."""
        self._was_ready.add(child.name)
        self._ready.add(child)
        self._early_deaths[child.name] = 0

    def was_ready(self, name: str) -> bool:
        """Whether a process of this name ever was ready."""
        return name in self._was_ready

    @property
    def all_ready(self) -> bool:
        """Whether both are."""
        return {self.engine, self.api} <= self._ready

    def is_ready(self, child: Child) -> bool:
        """Whether one of the present ones is."""
        return child in self._ready

    def is_due(self, name: str) -> bool:
        """Whether there is no such process at present, and one is to be started."""
        return name in self._due

    def heard(self, child: Child, pulse: Pulse) -> None:
        """It is alive."""
        if (watchdog := self._watchdogs.get(child)) is not None:
            watchdog.heard(pulse)

    def stuck(self) -> list[tuple[Child, str]]:
        """Those that make no progress, each once, and why."""
        found = [(child, why) for child, dog in self._watchdogs.items() if (why := dog.complaint())]
        for child, _ in found:
            del self._watchdogs[child]
        return found

    def in_flight(self) -> list[int]:
        """The sequences that the dead engine was working on."""
        return self._host.in_flight(self._directory, self._id)

    # --- replacing --------------------------------------------------------------------------------------------------

    def replace_engine(self, cause: str, in_flight: list[int]) -> None:
        """The engine is dead: another one takes its place, and clients are told."""
        self.engine_died_at = self._clock.now()
        dead, self._id = self._id, EngineId(self._id.engine, self._id.epoch + 1)
        self._notices.engine_died(self._number, Dead(cause, self._id, in_flight, source=dead))
        self._replace(self.engine)

    def give_up_engine(self, cause: str) -> None:
        """The engine is dead and is not replaced: clients are told."""
        self._notices.engine_died(self._number, Dead(cause, source=self._id))

    def replace_api(self) -> None:
        """The API process is dead: another one takes its place, and the engine is told."""
        self._notices.client_died(self._id, self._number)
        self._number += 1
        self._replace(self.api)

    def start_due(self) -> None:
        """Start what is to be started by now."""
        for name in [name for name, when in self._due.items() if when <= self._clock.now()]:
            del self._due[name]
            if name == "engine":
                self.engine = self._start_engine()
            else:
                self.api = self._start_api()

    def take_started(self) -> list[Child]:
        """Those started since the last call."""
        started, self._started = self._started, []
        return started

    def close(self) -> None:
        """End them at once."""
        self._notices.close()
        for child in (self.api, self.engine):
            child.kill()
            child.cause_of_death()
            child.close()

    def _replace(self, child: Child) -> None:
        """It is dead and no longer waited for."""
        delay = 0.0
        if child not in self._ready:
            delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** self._early_deaths[child.name])
            self._early_deaths[child.name] = min(_MAX_DOUBLINGS, self._early_deaths[child.name] + 1)
        self._ready.discard(child)
        self._watchdogs.pop(child, None)
        child.close()
        self._due[child.name] = self._clock.now() + delay
        self.start_due()

    def _start_engine(self) -> Child:
        return self._start("engine", self._modules.engine, LaunchConfig(
            self._config, str(self._directory), developer_mode=self._developer_mode, engine=self._id
        ))  # fmt: skip

    def _start_api(self) -> Child:
        return self._start("api", self._modules.api, LaunchConfig(
            self._config, str(self._directory), self._number, self._listen_fd, self._developer_mode, self._id
        ))  # fmt: skip

    def _start(self, name: str, module: str, launch: LaunchConfig) -> Child:
        child = self._host.start(name, module, launch)
        self._started.append(child)
        self._watchdogs[child] = Watchdog(child.pid, self._clock, self._host.state)
        return child
