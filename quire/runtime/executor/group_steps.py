"""What a rank does next that divides experts with other engines: its own engine's steps, or dummy steps for theirs.

All ranks of an engine do the same, for they meet within its steps, and those of all engines meet in layers with
experts. So before each step the ranks of an engine agree: only if all of them have the plan, they run it; else some
have come because another engine waits, and they run a dummy step first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.compute.collectives.engine_group import EngineGroup
from quire.compute.collectives.layout import group_bytes
from quire.compute.collectives.shared_memory import Ranks, shared_memory_collectives
from quire.compute.mesh import Mesh
from quire.errors import EngineDeadError
from quire.foundation.messages.workers import Plan
from quire.foundation.processes.launch import GroupEnds
from quire.foundation.processes.shared_memory import SharedMemory
from quire.runtime.executor.rank_messages import ToRanks

if TYPE_CHECKING:
    from quire.runtime.executor.rank_process import EngineChannel


class GroupSteps:
    """Decides the order of a rank's steps.

    Args:
        inbox: The engine's messages.
        ranks: Collectives over those of this engine.
        number: How many they are.
        group: All engines.
    """

    def __init__(self, inbox: EngineChannel, ranks: Ranks, number: int, group: EngineGroup) -> None:
        self._inbox = inbox
        self._ranks = ranks
        self._number = number
        self._group = group
        self._next: ToRanks | None = None

    def receive(self) -> ToRanks:
        """Wait for the engine's next message and return it; if it is a step, the others know that it begins. Until
        then, take part in the steps of other engines.

        Raises:
            EngineDeadError: A rank of another engine did not come.
        """
        while True:
            message, self._next = self._next or self._inbox.poll(), None
            if message is None and not self._group.is_awaited:
                self._sleep()
            elif message is not None and not (isinstance(message, Plan) and message.slots):
                return message
            elif self._all_have(message):
                assert message is not None
                self._group.begin_step()
                return message
            else:
                self._next = message
                self._group.run_dummy_step()

    def leave(self) -> None:
        """Go on for the other engines after Stop, until they have stopped too."""
        self._group.leave()
        while not self._group.all_leave:
            if self._group.is_awaited:
                self._all_have(None)
                self._group.run_dummy_step()
            else:
                self._group.wait()

    def _all_have(self, message: ToRanks | None) -> bool:
        """Whether all ranks of this engine have a plan to run.

        Raises:
            EngineDeadError: One of them did not come.
        """
        if self._number == 1:
            return message is not None
        have = torch.tensor([0.0 if message is None else 1.0])
        self._ranks.all_reduce(have)
        if (missing := self._ranks.missing) is not None:
            raise EngineDeadError(
                f"Rank {missing} of {self._number} was stuck: before a step the others waited for it."
            )
        return bool(have == self._number)

    def _sleep(self) -> None:
        self._inbox.wait_beside(self._group.bell)
        self._group.silence()


def engine_group(ends: GroupEnds, mesh: Mesh, spins: int, patience_s: float) -> EngineGroup:
    """A rank's part in the group of its engine; see shared_memory_collectives."""
    memory = SharedMemory(group_bytes(mesh), ends.memory_fd)
    everyone = Mesh(mesh.ep_rank, tp=mesh.ep)
    ranks = shared_memory_collectives(memory, everyone, 0, spins=spins, patience_s=patience_s)
    return EngineGroup(memory, mesh, ranks, ends.bells, patience_s)
