"""The processes of a server: which of them are ready, and who is told when one is replaced.

An engine that is replaced gets a new epoch, an API process a new number, another model's engines a new generation, so
nothing that was meant for a process reaches its successor.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Dead
from quire.foundation.processes.child_process import Child
from quire.foundation.processes.launch import LaunchConfig, Pulse
from quire.foundation.processes.orders import OpenModel, Order
from quire.serving.supervisor.lives import ApiProcesses, ModelEngines
from quire.serving.supervisor.process_host import THIS_MACHINE, ProcessHost
from quire.serving.supervisor.watchdog import Watchdog

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 10.0
"""Seconds before a process that died during its start is started again; they double each time."""
_MAX_DOUBLINGS = 10
"""Maximum number of doublings of that delay. More would make no difference, and not fit into a float."""


@dataclass(frozen=True)
class Modules:
    """The modules that the processes run, as `python -m` takes them."""

    engine: str = "quire.engine.start"
    api: str = "quire.serving.start"


MODULES = Modules()
"""The modules of a real server."""


class Children:
    """The engines and API processes of a server. They are started when this is made.

    `model` are the engines of the model that a new API process serves. While they are not ready, requests wait in an
    API process for `hold_s` seconds.
    """

    def __init__(self, launch: LaunchConfig, modules: Modules, clock: Clock, host: ProcessHost = THIS_MACHINE) -> None:
        self._launch = launch
        self._modules = modules
        self._clock = clock
        self._host = host
        self._was_ready: set[str] = set()
        self._ready: set[Child] = set()
        self._due: dict[str, float] = {}  # by name: when a process is started again
        self._early_deaths: Counter[str] = Counter()
        self._started: list[Child] = []
        self._watchdogs: dict[Child, Watchdog] = {}
        self._models: dict[int, ModelEngines] = {}
        self._generations = 0
        self.hold_s = 0.0
        self.model = self.add_model(launch.config, launch.asked or launch.config)
        self.apis = ApiProcesses(launch.config.server.api_server_count)
        self.apis.children += [self._start_api(place) for place in self.apis.places]
        self._started.clear()

    def __iter__(self) -> Iterator[Child]:
        return iter((*self.engines, *self.apis.children))

    # --- what is known of the processes -----------------------------------------------------------------------------

    @property
    def engines(self) -> list[Child]:
        return [child for model in self._models.values() for child in model.children]

    def place_of(self, child: Child) -> tuple[ModelEngines, int] | None:
        """The model and number of an engine; None if the process is no engine, or is replaced already."""
        for model in self._models.values():
            if (number := model.number_of(child)) is not None and child.name not in self._due:
                return model, number
        return None

    def ready(self, child: Child) -> None:
        self._was_ready.add(child.name)
        self._ready.add(child)
        self._early_deaths[child.name] = 0

    def was_ready(self, name: str) -> bool:
        return name in self._was_ready

    @property
    def all_ready(self) -> bool:
        return set(self) <= self._ready

    def failed_starts(self, child: Child) -> int:
        """How many starts in a row have failed, including that of this dead process; 0 if it had been ready."""
        return 0 if child in self._ready else self._early_deaths[child.name] + 1

    def is_ready(self, child: Child) -> bool:
        return child in self._ready

    @property
    def present_apis(self) -> list[Child]:
        """The API processes, except those that wait to be started again."""
        return [child for child in self.apis.children if child.name not in self._due]

    @property
    def awaits_api(self) -> bool:
        """Whether an API process waits to be started again."""
        return len(self.present_apis) < len(self.apis.children)

    def heard(self, child: Child, pulse: Pulse) -> None:
        if (watchdog := self._watchdogs.get(child)) is not None:
            watchdog.heard(pulse)

    def stuck(self) -> list[tuple[Child, str]]:
        """The processes that make no progress, and why. Each is named once."""
        found = [(child, why) for child, dog in self._watchdogs.items() if (why := dog.complaint())]
        for child, _ in found:
            del self._watchdogs[child]
        return found

    def partners(self, model: ModelEngines, engine: int) -> list[int]:
        """The engines that live and die with this one, except those that wait to be started again."""
        if model.group is None:
            return []
        present = [number for number, child in enumerate(model.children) if child.name not in self._due]
        return [number for number in present if number != engine]

    def died_at(self, generation: int, engine: int) -> float | None:
        """When this engine of a model died last; None if the model is gone."""
        model = self._models.get(generation)
        return None if model is None else model.died_at[engine]

    def all_gone(self, model: ModelEngines) -> bool:
        return all(child.exit_code() is not None for child in model.children)

    # --- replacing --------------------------------------------------------------------------------------------------

    def replace_engine(self, model: ModelEngines, number: int, cause: str, in_flight: list[int]) -> None:
        """Put another engine in the place of a dead one, and tell the clients."""
        model.died_at[number] = self._clock.now()
        if in_flight:
            model.last_in_flight[number] = frozenset(in_flight)
        dead = model.ids[number]
        model.ids[number] = successor = dead._replace(epoch=dead.epoch + 1)
        self._tell_clients(model, Dead(cause, successor, in_flight, source=dead))
        self._replace(model.children[number])

    def give_up_engine(self, model: ModelEngines, number: int, cause: str) -> None:
        """Tell the clients that an engine is dead and is not replaced."""
        self._tell_clients(model, Dead(cause, source=model.ids[number]))

    def replace_api(self, place: int) -> None:
        """Put another API process in the place of a dead one, and tell the engines."""
        dead = self.apis.begin_next_life(place)
        for model in self._models.values():
            for engine in model.ids:
                model.notices.client_died(engine, dead)
        self._replace(self.apis.children[place])

    def start_no_api(self) -> None:
        """Start no API process any more, because the server ends."""
        for place in self.apis.places:
            self._due.pop(self.apis.name(place), None)

    def start_due(self) -> None:
        for name in [name for name, when in self._due.items() if when <= self._clock.now()]:
            del self._due[name]
            for place, api in enumerate(self.apis.children):
                if api.name == name:
                    self.apis.children[place] = self._start_api(place)
            for model in self._models.values():
                for number, engine in enumerate(model.children):
                    if engine.name == name:
                        model.children[number] = self._start_engine(model, number)

    def take_started(self) -> list[Child]:
        """The processes that were started since the last call."""
        started, self._started = self._started, []
        return started

    def close(self) -> None:
        for model in self._models.values():
            model.notices.close()
        for child in self:
            child.kill()
        for child in self:
            child.cause_of_death()
            child.close()

    # --- models -----------------------------------------------------------------------------------------------------

    def add_model(self, config: Config, asked: Config) -> ModelEngines:
        """Start the engines of one more model. API processes are not told."""
        generation, self._generations = self._generations, self._generations + 1
        launch = msgspec.structs.replace(
            self._launch,
            config=config,
            directory=f"{self._launch.directory}/{generation}",
            generation=generation,
            asked=asked,
            created=int(time.time()),
            listen_fd=-1,
        )
        model = self._models[generation] = ModelEngines(launch, self._host)
        model.children += [self._start_engine(model, number) for number in range(len(model.ids))]
        return model

    def remove_model(self, model: ModelEngines) -> None:
        """End the engines of a model at once, and forget them."""
        del self._models[model.generation]
        self._started = [child for child in self._started if child not in model.children]
        for child in model.children:
            child.kill()
        for child in model.children:
            child.cause_of_death()
            self._forget(child)
            self._due.pop(child.name, None)
            self._early_deaths.pop(child.name, None)
            self._was_ready.discard(child.name)
        model.close()

    def open_model(self, model: ModelEngines, drain_timeout: float) -> None:
        """Tell the API processes to serve this model as soon as it is ready."""
        for child in self.present_apis:
            place = self.apis.place_of(child)
            assert place is not None
            child.tell(OpenModel(self.apis.launch(place, model.launch_of_api()), drain_timeout))

    def tell(self, order: Order) -> None:
        for child in self.present_apis:
            child.tell(order)

    def _tell_clients(self, model: ModelEngines, message: Dead) -> None:
        for number in self.apis.numbers:
            model.notices.engine_died(number, message)

    def _replace(self, child: Child) -> None:
        """Close a dead process, and start another: at once, or after a delay if it died before it was ready."""
        delay = 0.0
        if child not in self._ready:
            delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(_MAX_DOUBLINGS, self._early_deaths[child.name]))
            self._early_deaths[child.name] += 1
        self._forget(child)
        self._due[child.name] = self._clock.now() + delay
        self.start_due()

    def _forget(self, child: Child) -> None:
        self._ready.discard(child)
        self._watchdogs.pop(child, None)
        child.close()

    def _start_engine(self, model: ModelEngines, number: int) -> Child:
        return self._start(model.name(number), self._modules.engine, model.launch_of_engine(number))

    def _start_api(self, place: int) -> Child:
        launch = self.apis.launch(place, self.model.launch_of_api(self._launch.listen_fd, self.hold_s))
        return self._start(self.apis.name(place), self._modules.api, launch)

    def _start(self, name: str, module: str, launch: LaunchConfig) -> Child:
        child = self._host.start(name, module, launch)
        self._started.append(child)
        self._watchdogs[child] = Watchdog(child.pid, self._clock, self._host.state)
        return child
