"""In what order a rank runs its engine's steps and those of other engines: alike in all ranks of an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from quire.compute.collectives.layout import memory_bytes
from quire.compute.collectives.shared_memory import Ranks, shared_memory_collectives
from quire.compute.mesh import Mesh
from quire.foundation.messages.workers import Plan
from quire.foundation.processes.shared_memory import SharedMemory
from quire.runtime.executor.cpu_rank import GroupSteps
from quire.runtime.executor.rank_messages import Stop
from tests.collectives.test_engine_group import Group
from tests.executor.thread_ranks import Messages

ROWS = 3


def plan(step: int, *slots: int) -> Plan:
    return Plan(step=step, slots=list(slots), counts=[1] * len(slots))


class Engine:
    """Its ranks' loops, in threads; each step has some rows, and is a layer of the engine's and one of the
    group's."""

    def __init__(self, group: Group, number: int, tp: int) -> None:
        self.messages = [Messages() for _ in range(tp)]
        self.steps: list[list[int]] = [[] for _ in range(tp)]
        memory = SharedMemory(memory_bytes(Mesh(tp=tp), 0))
        self._threads = []
        for rank in range(tp):
            ranks = shared_memory_collectives(memory, Mesh(rank, tp=tp), 0, spins=0, patience_s=20)
            steps = GroupSteps(self.messages[rank], ranks, tp, group.ranks[number * tp + rank])
            body = self._body(steps, ranks, group, number * tp + rank, self.steps[rank])
            self._threads.append(threading.Thread(target=body))
        for thread in self._threads:
            thread.start()

    def _body(self, steps: GroupSteps, ranks: Ranks, group: Group, rank: int, done: list[int]) -> Callable[[], None]:
        def run() -> None:
            while not isinstance(message := steps.receive(), Stop):
                assert isinstance(message, Plan)
                if message.slots:
                    ranks.all_reduce(torch.ones(1))  # as attention does
                    group.layer(rank, torch.ones(ROWS, 3))
                done.append(message.step)
            steps.leave()

        return run

    def tell(self, message: Plan | Stop, late_s: float = 0.0) -> None:
        """All ranks, one after the other."""
        for messages in self.messages:
            messages.put(message)
            time.sleep(late_s)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "it waits for ever"
        for messages in self.messages:
            messages.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_engines_with_steps_at_any_time_do_not_wait_for_ever(tp: int) -> None:
    """Also where the ranks of an engine hear of a step at different times, before and after those of the others; a
    third one has none."""
    group = Group(3, tp)
    first, second, third = (Engine(group, number, tp) for number in range(3))
    for step in range(1, 40):
        first.tell(plan(step, 0), late_s=1e-3 * (step % 3))
        if step % 4 == 0:
            second.tell(plan(step, 0, 1), late_s=2e-3 * (step % 8 == 0))
        if step % 5 == 0:
            second.tell(plan(step))
    second.tell(Stop())
    for step in range(40, 45):
        first.tell(plan(step, 0), late_s=1e-3)
    first.tell(Stop())
    third.tell(Stop())
    for engine in (first, second, third):
        engine.join()
    assert first.steps == [list(range(1, 45))] * tp
    assert second.steps == [[step for step in range(1, 40) for _ in range((step % 4 == 0) + (step % 5 == 0))]] * tp
    rows = group.rows[0]
    assert group.rows == [rows] * 3 * tp, "all see the same steps"
    assert third.steps == [[]] * tp
    assert sum(rows) == ROWS * (44 + 9)


def test_nobody_takes_part_in_what_does_not_happen() -> None:
    group = Group(2, 1)
    engines = [Engine(group, number, 1) for number in range(2)]
    engines[0].tell(plan(1, 0))
    deadline = time.monotonic() + 60
    while group.rows != [[ROWS]] * 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert group.rows == [[ROWS]] * 2, "one step, and then all sleep"
    for engine in engines:
        engine.tell(Stop())
    for engine in engines:
        engine.join()
