"""The pool counts references; tables give back what they took."""

from __future__ import annotations

import pytest

from quire.kvcache.pool import DUMMY_BLOCK, BlockPool


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
    pool.share([block])
    pool.give_back([block])
    assert pool.num_free == 1
    pool.give_back([block])
    assert pool.num_free == 2


def test_giving_back_twice_or_sharing_a_free_block_is_our_own_mistake() -> None:
    pool = BlockPool(2, 16)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back([1])
    with pytest.raises(AssertionError, match="is free"):
        pool.share([1])


def test_contents_are_found_until_their_block_is_taken_again_oldest_first() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.take(3) or []
    keys = [(0, bytes([i])) for i in range(3)]
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.give_back([blocks[1], blocks[0], blocks[2]])
    assert [pool.find(key) for key in keys] == blocks
    pool.share([blocks[1]])
    assert pool.num_free == 2
    assert pool.take(1) == [blocks[0]]
    assert [pool.find(key) for key in keys] == [None, blocks[1], blocks[2]]


def test_a_run_ends_at_the_first_contents_that_no_block_has() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.take(4) or []
    hashes = [bytes([i]) for i in range(5)]
    for i in (0, 1, 3):
        pool.publish(blocks[i], (1, hashes[i]))
    read = iter(hashes)
    assert pool.find_run(1, read) == (hashes[:2], blocks[:2])
    assert next(read) == hashes[3], "read farther than the first that is missing"
    assert pool.find_run(0, hashes) == ([], [])


def test_the_first_block_with_some_contents_stays_the_one_that_is_found() -> None:
    pool = BlockPool(2, 16)
    first, second = pool.take(2) or []
    for block in (first, second):
        pool.publish(block, (0, b"same"))
    assert pool.find((0, b"same")) == first
    pool.forget(second)
    assert pool.find((0, b"same")) == first
    pool.forget_all()
    assert pool.find((0, b"same")) is None
