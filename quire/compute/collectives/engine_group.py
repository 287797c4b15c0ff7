"""Engines that divide the experts of each layer among all their ranks, and so compute these layers together.

Every engine has requests and attention of its own. In a layer with experts all ranks gather the rows of all engines
(all-gather), each computes what its experts add to any row, and each engine gets the sums of its own rows
(reduce-scatter). So all ranks go through these layers equally often: an engine without a step takes part in the steps
of others by a dummy step, which has no rows and consists of these layers alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from quire.compute.collectives.layout import RankState, begin_step, set_state, state_of, steps_begun
from quire.compute.collectives.shared_memory import Ranks
from quire.compute.mesh import Mesh
from quire.errors import EngineDeadError
from quire.foundation.processes.pipe_lines import wait_readable
from quire.foundation.processes.shared_memory import SharedMemory


class EngineGroup:
    """A rank's part in the group: `ranks` are collectives over all ranks of all engines, in `memory` of `group_bytes`
    that all ranks share; they wait for one another up to `patience_s`. `bells` are eventfds that do not block and wake
    a rank each."""

    def __init__(self, memory: SharedMemory, mesh: Mesh, ranks: Ranks, bells: Sequence[int], patience_s: float) -> None:
        self._words = memoryview(memory.view).cast("I")
        self._mesh = mesh
        self._ranks = ranks
        self._bells = bells
        self._patience_s = patience_s
        self._dummies: list[Callable[[], object]] = []
        self._rows: list[int] = []

    @property
    def bell(self) -> int:
        """An eventfd that is readable when another engine may await this rank (`is_awaited`)."""
        return self._bells[self._mesh.ep_rank]

    @property
    def is_awaited(self) -> bool:
        """Whether another engine has begun a step that this rank has not."""
        own = steps_begun(self._words, self._mesh.ep_rank)
        return any(0 < steps_begun(self._words, rank) - own & 0xFFFFFFFF < 1 << 31 for rank in range(self._mesh.ep))

    # --- layers -----------------------------------------------------------------------------------------------------

    def add(self, dummy: Callable[[], object]) -> bool:
        """Add a layer, in the order of a step, and return whether it is the first one. `dummy` computes the layer for
        no rows of this engine."""
        self._dummies.append(dummy)
        return len(self._dummies) == 1

    def count_rows(self, rows: int) -> None:
        """Tell the group how many rows all layers of a step have, before its first layer."""
        self._rows = [1] * self._mesh.engines
        (all_rows,) = self.gather(torch.tensor([[rows]]))
        self.check()
        self._rows = all_rows[:, 0].tolist()

    def gather(self, *x: Tensor) -> list[Tensor]:
        """Gather each tensor [rows, width] → [rows of all engines, width], engine by engine."""
        total = sum(self._rows)
        out = [each.new_empty((total, each.shape[1])) for each in x]
        self._ranks.gather_rows([each.contiguous() for each in x], self._rows, out)
        return out

    def reduce(self, x: Tensor) -> Tensor:
        """Add up the summands [rows of all engines, width] of all ranks → [rows, width]."""
        out = x.new_empty((self._rows[self._mesh.engine], x.shape[1]))
        self._ranks.reduce_rows(x, self._rows, out)
        return out

    # --- life -------------------------------------------------------------------------------------------------------

    def wait_until_all_serve(self) -> None:
        """Wait until all ranks have come here; the process that started them ends a start that takes too long."""
        self._come_to(RankState.SERVING)
        while not self._all_in(RankState.SERVING):
            self.wait()

    def leave(self) -> None:
        """Tell the group that this engine has no more steps of its own."""
        self._come_to(RankState.LEAVING)

    @property
    def all_leave(self) -> bool:
        """Whether no engine has more steps of its own."""
        return self._all_in(RankState.LEAVING)

    def begin_step(self) -> None:
        """Wake engines without a step while this step comes to its first layer with experts."""
        begin_step(self._words, self._mesh.ep_rank)
        self._ring_bells()

    def run_dummy_step(self) -> None:
        """Take part in a step of other engines."""
        begin_step(self._words, self._mesh.ep_rank)
        with torch.inference_mode():
            for dummy in self._dummies:
                dummy()
        self.check()

    def check(self) -> None:
        """Check that all ranks have come to the step. Raises EngineDeadError if a rank has not, so what was computed
        since then is wrong."""
        if (missing := self._ranks.missing) is not None:
            engine, rank = divmod(missing, self._mesh.tp)
            raise EngineDeadError(
                f"Rank {rank} of {self._mesh.tp} of engine {engine} was stuck: in a layer with experts others waited "
                f"{self._patience_s:g} s for it."
            )

    def wait(self) -> None:
        """Wait until the bell rings."""
        wait_readable(self.bell)
        self.silence()

    def silence(self) -> None:
        """Reset the bell, if it has rung."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.bell)

    def _come_to(self, state: RankState) -> None:
        set_state(self._words, self._mesh.ep_rank, state)
        self._ring_bells()

    def _all_in(self, state: RankState) -> bool:
        return all(state_of(self._words, rank) >= state for rank in range(self._mesh.ep))

    def _ring_bells(self) -> None:
        for rank, bell in enumerate(self._bells):
            if rank != self._mesh.ep_rank:
                os.eventfd_write(bell, 1)
