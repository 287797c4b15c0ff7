"""What a plan changes in the block tables."""

from __future__ import annotations

import msgspec
import pytest
import torch

from quire.foundation.messages.workers import Plan
from quire.runtime.worker.slot_table import SlotTable
from tests.worker.driver import apply_updates

EMPTY = Plan.empty()


@pytest.mark.parametrize("entries", [[(0, 1, 2, 7)], [(1, 3, 0, 5), (0, 3, 0, 6), (1, 3, 4, 8), (0, 0, 4, 9)]])
def test_entries_are_written_to_their_group_slot_and_place(entries: list[tuple[int, int, int, int]]) -> None:
    assert changed(entries) == {(group, slot, index): block for group, slot, index, block in entries}


def test_of_two_entries_of_one_place_the_later_counts() -> None:
    found = changed([(0, 1, 2, 7), (1, 1, 2, 4), (0, 1, 2, 8), (0, 1, 3, 5), (0, 1, 2, 9)])
    assert found == {(0, 1, 2): 9, (1, 1, 2): 4, (0, 1, 3): 5}


def test_blocks_of_several_entries_are_named_by_the_first() -> None:
    entries = [(1, 3, 0, 5), (0, 3, 0, 6), (1, 3, 4, 8)]
    assert changed(entries, (1, 3)) == {(1, 3, 0): 15, (0, 3, 0): 6, (1, 3, 4): 24}
    assert changed(entries, (1, 1)) == changed(entries)


def changed(
    entries: list[tuple[int, int, int, int]], of_blocks: tuple[int, ...] = ()
) -> dict[tuple[int, int, int], int]:
    """The entries in tables of two groups, four slots and five blocks, by group, slot and place."""
    groups, slots, indices, blocks = map(list, zip(*entries, strict=True))
    plan = msgspec.structs.replace(
        EMPTY, block_groups=groups, block_slots=slots, block_indices=indices, block_ids=blocks
    )
    table = SlotTable(3, 5, 2, 100, torch.device("cpu"), entries=of_blocks)
    apply_updates(table, plan)
    return {
        (group, slot, index): int(block)
        for group, of_group in enumerate(table.tables)
        for slot, line in enumerate(of_group)
        for index, block in enumerate(line)
        if block
    }
