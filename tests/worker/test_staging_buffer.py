"""A step's columns on their way to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.worker.buffer_ring import BufferRing
from quire.worker.staging_buffer import Column, StagingBuffer

CAPACITY = 40
DELAY = 10**8
"""Cycles of a card: it fetches long after the host has laid everything."""


def columns_of(step: int) -> list[Column]:
    """Four of ten entries, of which the fourth finds no room in 35, and one of seven, which finds none in 40."""
    ints = np.arange(10, dtype=np.int64) + 100 * step
    return [ints, ints / 8, -ints, ints * 2**40, ints[:7] / 3]


@pytest.mark.parametrize("fetched", [0, 2, 5])
@pytest.mark.parametrize("capacity", [35, CAPACITY, 47])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_step_finds_its_own_columns(capacity: int, device: str, fetched: int) -> None:
    """Also those that find no room, and while earlier steps have not fetched theirs."""
    columns = StagingBuffer(capacity, BufferRing(torch.device(device), in_flight=2))
    if device == "cuda":
        torch.cuda._sleep(DELAY)
    found = []
    for step in range(3):
        given = columns_of(step)
        laid = columns.lay(given[:fetched], given[fetched:])
        columns.fetch()
        found.append([column + 0 for column in laid])  # by a kernel: copy engines know no aliases
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
def test_what_is_fetched_stays_where_it_is(device: str) -> None:
    columns = StagingBuffer(CAPACITY, BufferRing(torch.device(device)))
    one, other = (columns.lay(columns_of(step)[:3], columns_of(step)[3:]) for step in range(2))
    assert [column.data_ptr() for column in one[:3]] == [column.data_ptr() for column in other[:3]]
    assert [columns.holds(column) for column in one] == [True, True, True, device == "cpu", False]


@pytest.mark.gpu
def test_a_recorded_step_fetches_what_was_laid_for_it() -> None:
    columns = StagingBuffer(CAPACITY, BufferRing(torch.device("cuda")))
    (column,) = columns.lay(columns_of(0)[:1])
    columns.fetch()
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(10, dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        columns.fetch()
        out.copy_(column)
    found = []
    torch.cuda._sleep(DELAY)
    for step in (1, 2):
        columns.lay(columns_of(step)[:1])
        graph.replay()
        found.append(out.clone())
    columns.lay(columns_of(3)[:1])
    columns.fetch()
    found.append(column.clone())
    assert [x.tolist() for x in found] == [columns_of(step)[0].tolist() for step in (1, 2, 3)]
