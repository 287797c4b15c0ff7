"""A step's columns on their way to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.staging_buffer import HostColumn, StagedColumns, StagingBuffer

CAPACITY = 40
DELAY = 10**8
"""Cycles of a GPU: it copies long after the host has staged everything."""


def columns_of(step: int) -> list[HostColumn]:
    """Four of ten entries, of which the fourth finds no room in 35, and one of seven, which finds none in 40."""
    ints = np.arange(10, dtype=np.int64) + 100 * step
    return [ints, ints / 8, -ints, ints * 2**40, ints[:7] / 3]


def stage(staging: StagingBuffer, columns: list[HostColumn], copied: int) -> tuple[list[Tensor], StagedColumns]:
    """The first `copied` columns in device memory, the others in host memory; and all of them, not copied yet."""
    first = staging.begin()
    tensors = [first.add(column) for column in columns[:copied]]
    others = first.end()
    tensors += [others.add(column) for column in columns[copied:]]
    return tensors, others.finish()


@pytest.mark.parametrize("copied", [0, 2, 5])
@pytest.mark.parametrize("capacity", [35, CAPACITY, 47])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_step_finds_its_own_columns(capacity: int, device: str, copied: int) -> None:
    """Also those that find no room, and while earlier steps have not copied theirs."""
    staging = StagingBuffer(capacity, BufferRing(torch.device(device), in_flight=2))
    if device == "cuda":
        torch.cuda._sleep(DELAY)
    found = []
    for step in range(3):
        tensors, staged = stage(staging, columns_of(step), copied)
        assert staging.overflowed == (capacity < 47)
        staged.copy_to_device()
        found.append([tensor + 0 for tensor in tensors])  # by a kernel: copy engines know no unowned views
    for step, of_step in enumerate(found):
        assert [column.tolist() for column in of_step] == [column.tolist() for column in columns_of(step)]
        assert [column.dtype for column in of_step] == [
            torch.int64,
            torch.float64,
            torch.int64,
            torch.int64,
            torch.float64,
        ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copied_columns_keep_their_addresses(device: str) -> None:
    staging = StagingBuffer(CAPACITY, BufferRing(torch.device(device)))
    one, staged = stage(staging, columns_of(0)[:4], 3)
    staged.copy_to_device()
    other, staged = stage(staging, columns_of(1)[:4], 3)
    assert [column.data_ptr() for column in one[:3]] == [column.data_ptr() for column in other[:3]]
    assert (one[3].data_ptr() == other[3].data_ptr()) == (device == "cpu")
    assert not staging.overflowed
    assert staged.num_copied == 30


def test_copied_columns_come_first() -> None:
    staging = StagingBuffer(CAPACITY, BufferRing(torch.device("cpu")))
    copied = staging.begin()
    copied.end().add(columns_of(0)[0])
    with pytest.raises(AssertionError, match="come before"):
        copied.add(columns_of(0)[1])


def test_each_step_is_copied_once_before_the_next_begins() -> None:
    staging = StagingBuffer(CAPACITY, BufferRing(torch.device("cpu")))
    _, staged = stage(staging, columns_of(0)[:1], 1)
    with pytest.raises(AssertionError, match="neither copied nor replayed"):
        staging.begin()
    with pytest.raises(AssertionError, match="has not copied"):
        staged.captured()
    staged.copy_to_device()
    for again in (staged.copy_to_device, staged.copy_by_replay):
        with pytest.raises(AssertionError, match="once"):
            again()
    stage(staging, columns_of(1)[:1], 1)[1].copy_by_replay()
    captured = staged.captured()
    captured.copy_to_device()
    captured.copy_to_device()
    staging.begin()


def test_a_step_that_is_alike_has_the_columns_of_the_other() -> None:
    staging = StagingBuffer(CAPACITY, BufferRing(torch.device("cpu")))
    (copied, _), staged = stage(staging, columns_of(0)[:2], 1)
    kept = staged.copied
    staged.copy_to_device()
    stage(staging, columns_of(1)[:2], 1)[1].copy_to_device()
    others = staging.begin_alike(kept)
    zero_copy = others.add(columns_of(2)[1])
    others.finish().copy_to_device()
    assert copied.tolist() == columns_of(0)[0].tolist()
    assert zero_copy.tolist() == columns_of(2)[1].tolist()


@pytest.mark.gpu
def test_a_captured_step_copies_what_was_staged_for_it() -> None:
    staging = StagingBuffer(CAPACITY, BufferRing(torch.device("cuda")))
    (column,), staged = stage(staging, columns_of(0)[:1], 1)
    staged.copy_to_device()
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(10, dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        staged.captured().copy_to_device()
        out.copy_(column)
    found = []
    torch.cuda._sleep(DELAY)
    for step in (1, 2):
        _, staged = stage(staging, columns_of(step)[:1], 1)
        staged.copy_by_replay()
        graph.replay()
        found.append(out.clone())
    stage(staging, columns_of(3)[:1], 1)[1].copy_to_device()
    found.append(column.clone())
    assert [x.tolist() for x in found] == [columns_of(step)[0].tolist() for step in (1, 2, 3)]
