"""Which parts of the host pool are there when, and which tensors its blocks are."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from quire.worker.pinned_host_pool import PinnedHostPool

SHAPE = torch.Size((3, 5))
PART = 4 * 60  # bytes of four blocks
LONG = 60.0


class Pinner:
    """Stands for the system's pinned memory."""

    def __init__(self, most: int = 100) -> None:
        self.threads: list[int] = []
        self.open = 0
        self._most = most

    def pin(self, size: int) -> Tensor:
        self.threads.append(threading.get_ident())
        if self.open == self._most:
            raise RuntimeError("out of memory")
        self.open += 1
        return torch.zeros(size, dtype=torch.uint8)

    def unpin(self, memory: Tensor) -> None:
        self.open -= 1


def pool_of(pinner: Pinner, pause_s: float = 0.0) -> PinnedHostPool:
    return PinnedHostPool(10, SHAPE, torch.float32, pinner.pin, pinner.unpin, PART, pause_s)


def test_consecutive_blocks_of_a_part_are_one_tensor() -> None:
    pool = pool_of(Pinner())
    blocks = [1, 2, 3, 4, 5, 9, 8, 0, 6, 7]
    runs = list(pool.runs(blocks))
    assert [(place, len(run)) for place, run in runs] == [(0, 3), (3, 2), (5, 1), (6, 1), (7, 1), (8, 2)]
    for place, run in runs:
        run.copy_(torch.tensor(blocks[place : place + len(run)]).view(-1, 1, 1).expand(-1, *SHAPE))
    for block in range(10):
        ((_, run),) = pool.runs([block])
        assert run.unique().tolist() == [block]
    assert list(pool.runs([])) == []
    pool.close()


def test_all_parts_are_pinned_by_another_thread_and_given_back() -> None:
    pinner = Pinner()
    pool = pool_of(pinner)
    pool.start()
    deadline = time.monotonic() + LONG
    while pinner.open < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    list(pool.runs(range(10)))
    assert pinner.open == 3
    assert threading.get_ident() not in pinner.threads
    pool.close()
    assert pinner.open == 0


def test_a_part_that_is_needed_is_not_paused_for() -> None:
    """It comes before others, and nobody waits for more than it."""
    pinner = Pinner()
    pool = pool_of(pinner, pause_s=LONG)
    began = time.monotonic()
    list(pool.runs([9]))
    list(pool.runs([5]))
    assert time.monotonic() - began < LONG / 2
    assert pinner.open <= 2
    pool.close()
    assert time.monotonic() - began < LONG / 2
    assert pinner.open == 0


def test_without_pinned_memory_blocks_are_in_ordinary_memory(caplog: pytest.LogCaptureFixture) -> None:
    pinner = Pinner(most=1)
    pool = pool_of(pinner)
    for block in range(10):
        ((_, run),) = pool.runs([block])
        run.fill_(block)
    assert [run.unique().tolist() for block in range(10) for _, run in pool.runs([block])] == [[b] for b in range(10)]
    assert len(pinner.threads) == 2, "asked once more than it gave, and not again for the part after that"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    pool.close()
    assert pinner.open == 0


def test_a_pool_of_no_blocks_pins_nothing() -> None:
    pinner = Pinner()
    pool = PinnedHostPool(0, SHAPE, torch.float32, pinner.pin, pinner.unpin)
    pool.start()
    pool.close()
    assert not pinner.threads
