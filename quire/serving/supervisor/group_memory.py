"""What engines that divide experts share: one piece of memory, and a bell for each rank.

These engines live and die together, because each waits for the others in every layer with experts. When they are
replaced, the next ones get a group of their own, so nothing reaches them from those before.
"""

from __future__ import annotations

import os

from quire.compute.collectives.layout import group_bytes, missing_rank
from quire.compute.mesh import Mesh, mesh_of
from quire.foundation.config.parallel import ParallelConfig
from quire.foundation.processes.launch import GroupEnds
from quire.foundation.processes.shared_memory import SharedMemory


class GroupMemory:
    """The memory and bells of one life of the engines."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._mesh: Mesh = mesh_of(parallel)
        self._memory = SharedMemory(group_bytes(self._mesh))
        self._words = memoryview(self._memory.view).cast("I")
        self._bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(self._mesh.ep)]

    def ends_of(self, engine: int) -> GroupEnds:
        """The ends that an engine inherits."""
        return GroupEnds(engine, self._memory.descriptor, self._bells)

    @property
    def missing_engine(self) -> int | None:
        """The engine for which the others have waited in vain; None if there is none."""
        rank = missing_rank(self._words, self._mesh.ep)
        return None if rank is None else rank // self._mesh.tp

    def close(self) -> None:
        """Let go of the memory. No engine of this life starts any more."""
        for fd in (self._memory.descriptor, *self._bells):
            os.close(fd)
