"""The engines of one model, what they share if they divide experts, and the API processes: which lives each has had.

An engine's life has an epoch, an API process's a number, and each model has a directory of its own, so nothing that was
meant for one process reaches its successor.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from quire.compute.collectives.layout import group_bytes, missing_rank
from quire.compute.mesh import Mesh, mesh_of
from quire.foundation.config.parallel import ParallelConfig
from quire.foundation.messages.from_engine import EngineId
from quire.foundation.processes.child_process import Child
from quire.foundation.processes.launch import GroupEnds, LaunchConfig, api_name
from quire.foundation.processes.shared_memory import HostBlockMemory, SharedMemory
from quire.serving.supervisor.process_host import ProcessHost


class GroupMemory:
    """The memory and bells of one life of the engines."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._mesh: Mesh = mesh_of(parallel)
        self._memory = SharedMemory(group_bytes(self._mesh))
        self._words = memoryview(self._memory.view).cast("I")
        self._bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(self._mesh.ep)]

    def ends_of(self, engine: int) -> GroupEnds:
        return GroupEnds(engine, self._memory.descriptor, self._bells)

    @property
    def missing_engine(self) -> int | None:
        """The engine for which the others have waited in vain; None if there is none."""
        rank = missing_rank(self._words, self._mesh.ep)
        return None if rank is None else rank // self._mesh.tp

    def close(self) -> None:
        """Let go of the memory. No engine of this life starts any more."""
        self._memory.close_descriptor()
        for bell in self._bells:
            os.close(bell)


class ModelEngines:
    """The engines of a model by their numbers. `launch` is what all processes of the model are told.

    Attributes:
        generation: Which model of the server this is: 0 the first, 1 its successor.
        ids: The present life of each engine.
        children: The present processes. One that is about to be replaced may be dead.
        last_in_flight: The sequences that each engine was working on when it last died with any.
        group: What the engines share if they divide experts; None if each lives for itself.
        host_memories: By engine: memory for blocks of the prefix cache, which outlives its lives; or none.
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
        self.host_memories = list[HostBlockMemory]()
        if launch.config.host_blocks_outlive_engine and os.path.isdir("/proc/self/fd"):
            size = launch.config.cache.host_bytes(parallel.ranks)
            self.host_memories = [HostBlockMemory(size) for _ in range(count)]
        self.ids = [EngineId(number) for number in range(count)]
        self.children: list[Child] = []
        self.died_at = [0.0] * count
        self.last_in_flight: list[frozenset[int]] = [frozenset()] * count
        self._host = host

    def name(self, number: int) -> str:
        """The name of an engine in messages, unique among all models."""
        name = "engine" if len(self.ids) == 1 else f"engine {number}"
        return f"{name} (model {self.generation})" if self.generation else name

    def launch_of_engine(self, number: int) -> LaunchConfig:
        group = None if self.group is None else self.group.ends_of(number)
        path = self.host_memories[number].path if self.host_memories else ""
        return msgspec.structs.replace(self.launch, engine=self.ids[number], group=group, host_memory=path)

    def renew_group(self) -> None:
        """Renew what the engines share, because all of them are replaced."""
        if self.group is not None:
            self.group.close()
            self.group = GroupMemory(self.launch.config.parallel)

    def launch_of_api(self, listen_fd: int = -1, hold_s: float = 0.0) -> LaunchConfig:
        return msgspec.structs.replace(self.launch, listen_fd=listen_fd, engines=tuple(self.ids), hold_s=hold_s)

    def number_of(self, child: Child) -> int | None:
        return next((number for number, engine in enumerate(self.children) if engine is child), None)

    def at_fault(self, number: int) -> int:
        """The engine that is to blame for the death of this one. Among engines that live and die together, this is the
        engine for which the others waited in vain."""
        missing = None if self.group is None else self.group.missing_engine
        return number if missing is None else missing

    def in_flight(self, number: int) -> list[int]:
        """The sequences that this dead engine was working on."""
        return self._host.in_flight(Path(self.launch.directory), self.ids[number])

    def close(self) -> None:
        """Remove what the ended processes of this model have left."""
        self.notices.close()
        if self.group is not None:
            self.group.close()
        for memory in self.host_memories:
            memory.close()
        shutil.rmtree(self.launch.directory, ignore_errors=True)


class ApiProcesses:
    """The API processes by their places: the number of each, and the process, dead if it is about to be replaced."""

    def __init__(self, count: int) -> None:
        self.numbers = list(range(count))
        self.children: list[Child] = []
        self._next_number = count

    @property
    def places(self) -> range:
        return range(len(self.numbers))

    def name(self, place: int) -> str:
        """The name of a process in messages."""
        return api_name(place, len(self.numbers))

    def place_of(self, child: Child) -> int | None:
        return next((place for place, api in enumerate(self.children) if api is child), None)

    @property
    def all_gone(self) -> bool:
        return all(child.exit_code() is not None for child in self.children)

    def launch(self, place: int, model: LaunchConfig) -> LaunchConfig:
        return msgspec.structs.replace(
            model,
            number=self.numbers[place],
            place=place,
            restarts=self._next_number - len(self.numbers),
            takes_orders=True,
        )

    def begin_next_life(self, place: int) -> int:
        """Give a place to another process. Returns the number of the process before."""
        before, self.numbers[place] = self.numbers[place], self._next_number
        self._next_number += 1
        return before
