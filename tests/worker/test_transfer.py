"""What a GPU's transfer lays for the device; moving itself is tested on a card, by preemption (tests/gpu)."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from quire.messages import Plan
from quire.worker.transfer import StreamTransfer


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
    columns = StreamTransfer.columns(Mock(), plan)
    assert [column.tolist() for column in columns] == [column for part in chosen for column in expected[part]]
    assert all(column.dtype == np.int64 and column.flags.c_contiguous for column in columns)
