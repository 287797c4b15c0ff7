"""The engines of one model: which lives they have had, where their sockets are, and whom they are told about.

Decides nothing. Each model has a directory of its own, so nothing that was meant for the engines of another reaches
these.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from quire.foundation.messages.from_engine import EngineId
from quire.foundation.processes.child import Child
from quire.foundation.processes.launch import LaunchConfig
from quire.serving.supervisor.group_memory import GroupMemory
from quire.serving.supervisor.process_host import ProcessHost


class ModelEngines:
    """Engines by their numbers.

    Args:
        launch: What all processes of this model are told.
        host: Where they run.

    Attributes:
        generation: Which model it is: 0 the first, 1 what took its place.
        ids: The present life of each engine.
        children: The present processes; one that is to be replaced may be dead.
        died_at: When each died last.
        last_in_flight: The sequences that each was working on when it died last while it had any.
        group: What they share, if they divide experts; None: nothing, each lives for itself.
        notices: Tells the other side of a death.
    """

    def __init__(self, launch: LaunchConfig, host: ProcessHost) -> None:
        self.launch = launch
        self.generation = launch.generation
        Path(launch.directory).mkdir(mode=0o700, exist_ok=True)
        self.notices = host.notices(Path(launch.directory))
        parallel = launch.config.parallel
        count = parallel.data_parallel_size
        self.group = GroupMemory(parallel) if parallel.engines_share_experts else None
        self.ids = [EngineId(number) for number in range(count)]
        self.children: list[Child] = []
        self.died_at = [0.0] * count
        self.last_in_flight: list[frozenset[int]] = [frozenset()] * count
        self._host = host

    def name(self, number: int) -> str:
        """What an engine is called in messages; unique among all models."""
        name = "engine" if len(self.ids) == 1 else f"engine {number}"
        return f"{name} (model {self.generation})" if self.generation else name

    def launch_of_engine(self, number: int) -> LaunchConfig:
        """What an engine is told."""
        group = None if self.group is None else self.group.ends_of(number)
        return msgspec.structs.replace(self.launch, engine=self.ids[number], group=group)

    def renew_group(self) -> None:
        """Renew what the engines share, since all of them are replaced."""
        if self.group is not None:
            self.group.close()
            self.group = GroupMemory(self.launch.config.parallel)

    def launch_of_api(self, listen_fd: int = -1, hold_s: float = 0.0) -> LaunchConfig:
        """What every API process is told that serves this model, see ApiProcesses."""
        return msgspec.structs.replace(self.launch, listen_fd=listen_fd, engines=tuple(self.ids), hold_s=hold_s)

    def number_of(self, child: Child) -> int | None:
        """Which of the present engines a process is; None: none of them."""
        return next((number for number, engine in enumerate(self.children) if engine is child), None)

    def in_flight(self, number: int) -> list[int]:
        """The sequences that this engine, which is dead, was working on."""
        return self._host.in_flight(Path(self.launch.directory), self.ids[number])

    def close(self) -> None:
        """Remove what the processes of this model have left; they are gone."""
        self.notices.close()
        if self.group is not None:
            self.group.close()
        shutil.rmtree(self.launch.directory, ignore_errors=True)
