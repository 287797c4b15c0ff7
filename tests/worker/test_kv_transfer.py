"""Blocks that are copied and swapped on a GPU: on a CPU with fake streams, by the reference of the GPU's kernel."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kvcache.host_pool import HostPool
from quire.messages import Plan
from quire.worker import kv_transfer
from quire.worker.kv_transfer import GpuBlockTransfer
from tests.worker.fake_streams import use_fake_streams

STORAGES, BLOCKS, ELEMENTS = 2, 100, 6
BLOCK_BYTES = STORAGES * ELEMENTS * 4
STAGED = 16
"""Blocks of a staging buffer."""


def plan_of(**moves: Any) -> Plan:
    return Plan(1, [], [], [], [], [], [], [], [], [], [], **moves)


@pytest.mark.parametrize("moves", ["out", "copies", "in", "all"])
def test_columns_name_the_devices_blocks_of_swaps_first(moves: str) -> None:
    given = {
        "out": {"swap_out": [(2, 0), (3, 1), (4, 2), (6, 3)]},
        "copies": {"copies": [(7, 8), (1, 9)]},
        "in": {"swap_in": [(5, 12), (0, 11), (3, 10)]},
    }
    chosen = given if moves == "all" else {moves: given[moves]}
    plan = plan_of(**{k: v for part in chosen.values() for k, v in part.items()})
    expected = {"out": [[2, 3, 4, 6], [0, 1, 2, 3]], "copies": [[7, 1], [8, 9]], "in": [[12, 11, 10], [5, 0, 3]]}
    columns = GpuBlockTransfer.columns(Mock(), plan)
    assert [column.tolist() for column in columns] == [column for part in chosen for column in expected[part]]
    assert all(column.dtype == np.int64 and column.flags.c_contiguous for column in columns)


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
    transfer = GpuBlockTransfer(blocks, 80)
    yield transfer
    transfer.close()


def apply(transfer: GpuBlockTransfer, plan: Plan) -> None:
    device = transfer._blocks.device
    transfer.apply(plan, [torch.from_numpy(column).to(device) for column in transfer.columns(plan)])


def test_a_swap_takes_a_copy_for_each_staging_buffer_and_not_for_each_block(host: HostCopies) -> None:
    blocks, pool = torch.zeros((STORAGES, BLOCKS, 2, 3)), HostPool(80)
    transfer = GpuBlockTransfer(blocks, 80)
    out = list(zip(range(1, 65), pool.allocate(64), strict=True))
    apply(transfer, plan_of(swap_out=out))
    assert host.copies == 64 // STAGED
    apply(transfer, plan_of(swap_in=[(to, block) for block, to in out]))
    assert host.copies == 2 * 64 // STAGED
    transfer.close()


def test_no_memory_is_pinned_by_the_engines_thread(host: HostCopies) -> None:
    transfer = GpuBlockTransfer(torch.zeros((STORAGES, BLOCKS, 2, 3)), 80)
    transfer.prepare_host_pool()
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
