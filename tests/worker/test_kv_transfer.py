"""What a GPU's transfer lays for the device; moving itself is tested on a card, by preemption (tests/gpu)."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from quire.messages import Plan
from quire.worker.kv_transfer import GpuBlockTransfer, _PinnedPool


@pytest.mark.parametrize("moves", ["out", "copies", "in", "all"])
def test_columns_name_the_devices_blocks_of_swaps_first(moves: str) -> None:
    given = {
        "out": {"swap_out": [(2, 0), (3, 1), (4, 2), (6, 3)]},
        "copies": {"copies": [(7, 8), (1, 9)]},
        "in": {"swap_in": [(5, 12), (0, 11), (3, 10)]},
    }
    chosen = given if moves == "all" else {moves: given[moves]}
    plan = Plan(
        1, [], [], [], [], [], [], [], [], [], [], **{k: v for part in chosen.values() for k, v in part.items()}
    )
    expected = {"out": [[2, 3, 4, 6], [0, 1, 2, 3]], "copies": [[7, 1], [8, 9]], "in": [[12, 11, 10], [5, 0, 3]]}
    columns = GpuBlockTransfer.columns(Mock(), plan)
    assert [column.tolist() for column in columns] == [column for part in chosen for column in expected[part]]
    assert all(column.dtype == np.int64 and column.flags.c_contiguous for column in columns)


def test_without_pinned_memory_blocks_are_swapped_through_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, asked = torch.empty, []

    def refuse(*shape: object, pin_memory: bool = False, **rest: object) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return make(*shape, **rest)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", refuse)
    pool = _PinnedPool(torch.Size((3, 5)), torch.float32, part=4)
    for block in range(10):
        pool[block].fill_(block)
    assert [pool[block].unique().tolist() for block in range(10)] == [[block] for block in range(10)]
    assert asked == [True, False, False, False], "asked once, and not again for the two parts after it"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
