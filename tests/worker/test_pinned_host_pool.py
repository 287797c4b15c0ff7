"""Which parts of the host pool are ready when, and which tensors its blocks are."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from quire.runtime.worker.pinned_host_pool import PinnedHostPool

SHAPE = torch.Size((3, 5))
LONG = 60.0


class Pinner:
    """Stands for the system's pinned memory. `open` is how much of it is pinned, in parts."""

    def __init__(self, most: int = 100) -> None:
        self.threads: list[int] = []
        self.sizes: list[int] = []
        self.open = 0
        self.gate = threading.Event()
        self.gate.set()
        self._most = most

    def pin(self, size: int) -> Tensor:
        self.threads.append(threading.get_ident())
        self.gate.wait(LONG)
        if self.open == self._most:
            raise RuntimeError("out of memory")
        self.open += 1
        self.sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    def unpin(self, memory: Tensor) -> None:
        self.open -= 1


def pool_of(pinner: Pinner, pause_s: float = 0.0, shape: torch.Size = SHAPE) -> PinnedHostPool:
    part = 4 * 4 * shape.numel()
    return PinnedHostPool(10, shape, torch.float32, pinner.pin, pinner.unpin, part, pause_s)


def wait_until_ready(pool: PinnedHostPool, blocks: int) -> None:
    deadline = time.monotonic() + LONG
    while pool.num_ready < blocks:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_consecutive_blocks_of_a_part_are_one_tensor() -> None:
    pool = pool_of(Pinner())
    pool.start()
    wait_until_ready(pool, 10)
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
    assert pool.num_ready == 0
    pool.start()
    wait_until_ready(pool, 10)
    assert pinner.sizes == [240, 240, 120], "no more than the blocks of the pool"
    assert threading.get_ident() not in pinner.threads
    pool.close()
    assert pinner.open == 0


def test_blocks_are_ready_part_by_part() -> None:
    pool = pool_of(Pinner(), pause_s=10 * LONG)  # longer than a test may take: it is cut short
    pool.start()
    wait_until_ready(pool, 1)
    assert pool.num_ready == 4
    pool.close()


def test_closing_waits_for_one_part_at_most() -> None:
    pinner = Pinner()
    pinner.gate.clear()
    pool = pool_of(pinner)
    pool.start()
    closing = threading.Thread(target=pool.close)
    closing.start()
    pinner.gate.set()
    closing.join(LONG)
    assert not closing.is_alive()
    assert len(pinner.threads) <= 3
    assert pinner.open == 0


def test_nothing_more_is_pinned_after_the_end() -> None:
    pinner = Pinner()
    pool = pool_of(pinner, pause_s=LONG)
    pool.start()
    wait_until_ready(pool, 4)
    pool.close()
    assert len(pinner.sizes) == 1


@pytest.mark.parametrize(("parts", "in_use"), [(0, "0.0 MiB of 10.0 MiB"), (1, "4.0 MiB of 10.0 MiB")])
def test_what_cannot_be_pinned_is_never_ready(parts: int, in_use: str, caplog: pytest.LogCaptureFixture) -> None:
    pinner = Pinner(most=parts)
    pool = pool_of(pinner, shape=torch.Size((2**18,)))
    pool.start()
    assert pool._thread is not None
    pool._thread.join(LONG)
    assert pool.num_ready == 4 * parts
    assert len(pinner.threads) == parts + 1, "asked once more than it gave, and not again"
    ((level, text),) = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert level == "WARNING"
    assert f"{in_use} for KV blocks" in text
    assert "out of memory" in text
    pool.close()
    assert pinner.open == 0


def test_a_pool_of_no_blocks_pins_nothing() -> None:
    pinner = Pinner()
    pool = PinnedHostPool(0, SHAPE, torch.float32, pinner.pin, pinner.unpin)
    pool.start()
    pool.close()
    assert pool.num_ready == 0
    assert not pinner.threads
