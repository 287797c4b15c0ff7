"""Ranks of engines that divide experts: who is awaited, who takes part without rows, and who is named that does not."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from quire.compute.collectives.engine_group import EngineGroup
from quire.compute.collectives.layout import group_bytes
from quire.compute.collectives.shared_memory import shared_memory_collectives
from quire.compute.mesh import Mesh
from quire.errors import EngineDeadError
from quire.foundation.processes.shared_memory import SharedMemory

T = TypeVar("T")


class Group:
    """All ranks of some engines, each with a layer that adds 1 to all rows for each rank, and notes how many there
    were."""

    def __init__(self, engines: int, tp: int, patience_s: float = 30.0) -> None:
        self.meshes = [Mesh(rank, tp, 1, engines * tp, engine) for engine in range(engines) for rank in range(tp)]
        memory = SharedMemory(group_bytes(self.meshes[0]))
        bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in self.meshes]
        self.ranks = []
        self.rows: list[list[int]] = [[] for _ in self.meshes]
        for mesh in self.meshes:
            everyone = Mesh(mesh.ep_rank, tp=mesh.ep)
            ranks = shared_memory_collectives(memory, everyone, 0, spins=0, patience_s=patience_s)
            self.ranks.append(EngineGroup(memory, mesh, ranks, bells, patience_s))
        self.firsts = [
            group.add(lambda rank=rank: self.layer(rank, torch.empty(0, 3))) for rank, group in enumerate(self.ranks)
        ]

    def step(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self.ranks[rank].begin_step()
        return self.layer(rank, x)

    def layer(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        group = self.ranks[rank]
        group.count_rows(len(x))
        (gathered,) = group.gather(x)
        self.rows[rank].append(len(gathered))
        return group.reduce(gathered + 1)

    def run(self, *bodies: Callable[[], T]) -> list[T]:
        """At the same time, one after the other if there is one."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return [future.result() for future in [pool.submit(body) for body in bodies]]


def is_rung(group: EngineGroup) -> bool:
    return bool(select.select([group.bell], [], [], 0)[0])


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_without_a_step_takes_part_and_each_gets_its_own_rows(tp: int) -> None:
    group = Group(2, tp)
    x, y = torch.randn(4, 3), torch.randn(2, 3)
    assert not any(rank.is_awaited or is_rung(rank) for rank in group.ranks)

    def first_engine(rank: int) -> torch.Tensor:
        return group.step(rank, x)

    def second_engine(rank: int) -> torch.Tensor | None:
        group.ranks[rank].wait()
        while not group.ranks[rank].is_awaited:
            group.ranks[rank].wait()
        return group.ranks[rank].run_dummy_step()

    bodies = [lambda rank=rank: (second_engine if rank >= tp else first_engine)(rank) for rank in range(2 * tp)]
    found = group.run(*bodies)
    for each in found[:tp]:
        assert each is not None
        torch.testing.assert_close(each, 2 * tp * (x + 1))
    assert group.rows == [[4]] * 2 * tp
    assert not any(rank.is_awaited for rank in group.ranks)
    both = group.run(*[lambda rank=rank: group.step(rank, y if rank >= tp else x) for rank in range(2 * tp)])
    for rank, each in enumerate(both):
        torch.testing.assert_close(each, 2 * tp * ((y if rank >= tp else x) + 1))
    assert group.rows == [[4, 6]] * 2 * tp


def test_the_first_layer_begins_a_step() -> None:
    group = Group(2, 1)
    assert group.firsts == [True, True]
    assert not group.ranks[0].add(lambda: None)


def test_a_rank_that_does_not_come_is_named_by_all() -> None:
    group, started = Group(2, 2, patience_s=1.0), threading.Barrier(3)

    def come(rank: int) -> torch.Tensor:
        started.wait()
        return group.step(rank, torch.ones(2, 3))

    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(come, rank) for rank in (0, 1, 3)]
        for future in futures:
            with pytest.raises(EngineDeadError, match=r"Rank 0 of 2 of engine 1 was stuck: .* waited 1 s"):
                future.result()
    began = time.monotonic()
    for _ in range(60):
        with pytest.raises(EngineDeadError, match="Rank 0 of 2 of engine 1"):
            group.ranks[2].run_dummy_step()
    assert time.monotonic() - began < 30, "nobody is waited for any more"


def test_starts_and_ends_wait_for_all() -> None:
    group = Group(2, 1)
    first, second = group.ranks
    with ThreadPoolExecutor(1) as pool:
        starts = pool.submit(first.wait_until_all_serve)
        time.sleep(0.1)
        assert not starts.done()
        second.wait_until_all_serve()
        starts.result()
    first.leave()
    assert not second.all_leave
    second.leave()
    assert first.all_leave
    assert second.all_leave
