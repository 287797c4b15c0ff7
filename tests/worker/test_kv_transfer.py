"""Blocks that are copied and swapped on a GPU: on a CPU with fake streams, by the reference of the GPU's kernel."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from quire.foundation.messages.workers import Plan
from quire.runtime.worker import kv_transfer
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.kv_transfer import BlockMoves, GpuBlockTransfer
from quire.runtime.worker.staging_buffer import StagingBuffer
from quire.scheduling.kvcache.host_pool import HostPool
from tests.worker.fake_streams import use_fake_streams

STORAGES, BLOCKS, ELEMENTS = 2, 100, 6
BLOCK_BYTES = STORAGES * ELEMENTS * 4
STAGED = 16
"""Blocks of a staging buffer."""


def plan_of(**moves: Any) -> Plan:
    return Plan(step=1, **moves)


def moves_of(plan: Plan, device: str = "cpu") -> BlockMoves:
    """What is staged for the plan."""
    zero_copy = StagingBuffer(1_000, BufferRing(torch.device(device))).begin().end()
    moves = GpuBlockTransfer.stage(Mock(), plan, zero_copy)
    zero_copy.finish()
    return moves


def test_only_the_devices_blocks_of_a_plan_are_staged() -> None:
    swap_out, copies, swap_in = [(2, 0), (3, 1), (6, 3)], [(7, 8), (1, 9)], [(5, 12), (0, 11), (3, 10)]
    moves = moves_of(plan_of(swap_out=swap_out, copies=copies, swap_in=swap_in))
    assert moves.swap_out is not None
    assert moves.swap_out.tolist() == [2, 3, 6]
    assert moves.copy_sources is not None
    assert moves.copy_sources.tolist() == [7, 1]
    assert moves.copy_targets is not None
    assert moves.copy_targets.tolist() == [8, 9]
    assert moves.swap_in is not None
    assert moves.swap_in.tolist() == [12, 11, 10]
    assert moves_of(plan_of(copies=copies)).swap_in is None
    assert moves_of(plan_of()) == BlockMoves()


class HostCopies:
    """Counts copies to and from the host pool, and knows which threads pinned memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.copies = 0
        self.pinning: list[int] = []
        copy = Tensor.copy_

        def counted(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            self.copies += 1
            return copy(target, source)

        def pin(size: int) -> Tensor:
            self.pinning.append(threading.get_ident())
            return torch.empty(size, dtype=torch.uint8)

        patch.setattr(Tensor, "copy_", counted)
        patch.setattr(kv_transfer, "pin_host_memory", pin)
        patch.setattr(kv_transfer, "unpin_host_memory", lambda memory: None)
        patch.setattr(kv_transfer, "STAGING_BYTES", STAGED * BLOCK_BYTES)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostCopies:
    use_fake_streams(monkeypatch)
    return HostCopies(monkeypatch)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def blocks(request: pytest.FixtureRequest) -> Tensor:
    return torch.randn((STORAGES, BLOCKS, 2, 3), device=request.param)


@pytest.fixture
def transfer(blocks: Tensor, request: pytest.FixtureRequest) -> Iterator[GpuBlockTransfer]:
    """With fake streams and countable copies on a CPU."""
    if blocks.device.type == "cpu":
        request.getfixturevalue("host")
    else:
        request.getfixturevalue("monkeypatch").setattr(kv_transfer, "STAGING_BYTES", STAGED * BLOCK_BYTES)
    transfer = ready_transfer(blocks)
    yield transfer
    transfer.close()


def ready_transfer(blocks: Tensor) -> GpuBlockTransfer:
    """With 80 host blocks, all of them ready."""
    transfer, deadline = GpuBlockTransfer(blocks, 80), time.monotonic() + 60
    transfer.prepare_host_pool()
    transfer.prepare_loads()
    while transfer.ready_host_blocks < 80:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return transfer


def apply(transfer: GpuBlockTransfer, plan: Plan) -> None:
    transfer.apply(plan, moves_of(plan, transfer._blocks.device.type))


def test_a_swap_takes_a_copy_for_each_staging_buffer_and_not_for_each_block(host: HostCopies) -> None:
    blocks, pool = torch.zeros((STORAGES, BLOCKS, 2, 3)), HostPool(80)
    transfer = ready_transfer(blocks)
    out = list(zip(range(1, 65), pool.allocate(64), strict=True))
    apply(transfer, plan_of(swap_out=out))
    assert host.copies == 64 // STAGED
    apply(transfer, plan_of(swap_in=[(to, block) for block, to in out]))
    assert host.copies == 2 * 64 // STAGED
    transfer.close()


def test_blocks_that_are_loaded_beside_the_steps_arrive_in_their_places(
    transfer: GpuBlockTransfer, blocks: Tensor
) -> None:
    """More than a staging buffer has room for, from places that are not in order."""
    before = blocks.clone()
    hosts = [*range(40, 40 + STAGED), 3, 1, 2, 70]
    apply(transfer, plan_of(swap_out=[(1 + place, host) for place, host in enumerate(hosts)]))
    blocks.zero_()
    targets = list(reversed(range(1, 1 + len(hosts))))
    transfer.load(list(zip(hosts, targets, strict=True)))
    for place, target in enumerate(targets):
        assert torch.equal(blocks[:, target], before[:, 1 + place])


def test_blocks_that_are_saved_beside_the_steps_are_there_when_they_are_loaded(
    transfer: GpuBlockTransfer, blocks: Tensor
) -> None:
    """More than a staging buffer has room for, to places that are not in order; and the halves of it are reused."""
    before = blocks.clone()
    hosts = [*range(40, 42 + 2 * STAGED), 3, 1, 2, 79]
    transfer.save([(1 + place, host) for place, host in enumerate(hosts)])
    blocks.zero_()
    transfer.load([(host, 99 - place) for place, host in enumerate(hosts)])
    for place in range(len(hosts)):
        assert torch.equal(blocks[:, 99 - place], before[:, 1 + place])


def test_no_memory_is_pinned_by_the_engines_thread(host: HostCopies) -> None:
    transfer = ready_transfer(torch.zeros((STORAGES, BLOCKS, 2, 3)))
    apply(transfer, plan_of(swap_out=[(1, 7)]))
    transfer.close()
    assert host.pinning
    assert threading.get_ident() not in host.pinning


@pytest.mark.parametrize("hosts", [list(range(60)), [*range(79, 19, -1)], [*range(0, 80, 2), *range(1, 40, 2)]])
def test_blocks_come_back_as_they_left(hosts: list[int], blocks: Tensor, transfer: GpuBlockTransfer) -> None:
    """To other blocks, from runs of the host pool and from single ones, and beside copies on the device."""
    before = blocks.clone()
    apply(transfer, plan_of(swap_out=[(1 + i, host) for i, host in enumerate(hosts)], copies=[(90, 1), (91, 2)]))
    assert torch.equal(blocks[:, 1:3], before[:, 90:92])
    blocks[:, 1:80] = 0
    apply(transfer, plan_of(swap_in=[(host, 70 - i) for i, host in enumerate(hosts)]))
    assert torch.equal(blocks[:, 11:71].flip(1), before[:, 1:61])
    assert torch.equal(blocks[:, 80:], before[:, 80:])


@pytest.mark.gpu
def test_host_memory_is_pinned_and_given_back() -> None:
    memory = kv_transfer.pin_host_memory(2**20)
    assert memory.is_pinned()
    assert memory.unique().tolist() == [0]
    kv_transfer.unpin_host_memory(memory)
    assert not memory.is_pinned()
