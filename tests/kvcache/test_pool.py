"""The pool counts references; tables give back what they took."""

from __future__ import annotations

import pytest

from quire.kvcache.pool import DUMMY_BLOCK, BlockPool
from quire.kvcache.table import BlockTable


def test_blocks_are_handed_out_once_and_never_the_dummy() -> None:
    pool = BlockPool(5, 16)
    taken = pool.take(5)
    assert taken is not None
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert DUMMY_BLOCK not in taken
    assert pool.take(1) is None
    pool.give_back(taken[:2])
    assert pool.num_free == 2


def test_a_shared_block_is_free_when_its_last_holder_gives_it_back() -> None:
    pool = BlockPool(2, 16)
    (block,) = pool.take(1) or []
    pool.share(block)
    pool.give_back([block])
    assert pool.num_free == 1
    pool.give_back([block])
    assert pool.num_free == 2


def test_giving_back_twice_or_sharing_a_free_block_is_our_own_mistake() -> None:
    pool = BlockPool(2, 16)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back([1])
    with pytest.raises(AssertionError, match="is free"):
        pool.share(1)


def test_a_table_grows_by_what_is_missing_or_not_at_all() -> None:
    pool = BlockPool(5, 4)
    table, other = BlockTable(pool, 1), BlockTable(pool, 1)
    assert [change.entry for change in table.grow(5) or []] == [0, 1]
    assert table.grow(8) == []
    assert table.missing(9) == 1
    assert len(other.grow(12) or []) == 3
    assert table.grow(9) is None
    assert table.num_blocks == 2
    other.release()
    assert table.grow(9) is not None
    table.release()
    assert pool.num_free == 5


def test_every_group_has_blocks_of_its_own() -> None:
    pool = BlockPool(4, 4)
    changes = BlockTable(pool, 2).grow(8)
    assert changes is not None
    assert sorted((change.group, change.entry) for change in changes) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({change.block for change in changes}) == 4
