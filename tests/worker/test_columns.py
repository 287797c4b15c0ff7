"""A step's columns on their way to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.worker.columns import Column, StepColumns

CAPACITY = 40
DELAY = 10**8
"""Cycles of a card: it copies long after the host has laid everything."""


def columns_of(step: int) -> list[Column]:
    """Four of ten entries, of which the fourth finds no room in 35, and one of seven, which finds none in 40."""
    ints = np.arange(10, dtype=np.int64) + 100 * step
    return [ints, ints / 8, -ints, ints * 2**40, ints[:7] / 3]


@pytest.mark.parametrize("capacity", [35, CAPACITY, 47])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_step_finds_its_own_columns(capacity: int, device: str) -> None:
    """Also those that find no room, and while the copies of earlier steps are under way."""
    columns = StepColumns(capacity, torch.device(device), in_flight=2)
    if device == "cuda":
        torch.cuda._sleep(DELAY)
    found = [[column.clone() for column in columns.lay(columns_of(step))] for step in range(3)]
    for step, laid in enumerate(found):
        assert [column.tolist() for column in laid] == [column.tolist() for column in columns_of(step)]
        assert [column.dtype for column in laid] == [
            torch.int64,
            torch.float64,
            torch.int64,
            torch.int64,
            torch.float64,
        ]


def test_columns_stay_where_they_are() -> None:
    columns = StepColumns(CAPACITY, torch.device("cpu"))
    one, other = (columns.lay(columns_of(step)[:4]) for step in range(2))
    assert [column.data_ptr() for column in one] == [column.data_ptr() for column in other]
