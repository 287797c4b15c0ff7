"""The pool counts references and caches contents."""

from __future__ import annotations

import pytest

from quire.scheduling.kvcache.block_pool import DUMMY_BLOCK, BlockPool


def test_blocks_are_allocated_once_and_never_the_dummy() -> None:
    pool = BlockPool(5, 16)
    allocated = pool.allocate(5)
    assert allocated is not None
    assert sorted(allocated) == [1, 2, 3, 4, 5]
    assert DUMMY_BLOCK not in allocated
    assert pool.allocate(1) is None
    pool.free(allocated[:2])
    assert pool.num_free == 2


def test_a_shared_block_is_free_when_its_last_holder_frees_it() -> None:
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1) or []
    pool.share([block])
    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2


def test_freeing_twice_or_sharing_a_free_block_is_our_own_mistake() -> None:
    pool = BlockPool(2, 16)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([1])
    with pytest.raises(AssertionError, match="is free"):
        pool.share([1])


def test_contents_are_cached_until_their_block_is_allocated_again_oldest_first() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(3) or []
    keys = [(0, bytes([i])) for i in range(3)]
    for block, key in zip(blocks, keys, strict=True):
        pool.cache_block(block, key)
    pool.free([blocks[1], blocks[0], blocks[2]])
    assert [pool.get_cached_block(key) for key in keys] == blocks
    pool.share([blocks[1]])
    assert pool.num_free == 2
    assert pool.allocate(1) == [blocks[0]]
    assert [pool.get_cached_block(key) for key in keys] == [None, blocks[1], blocks[2]]


def test_a_run_ends_at_the_first_contents_that_no_block_has() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(4) or []
    hashes = [bytes([i]) for i in range(5)]
    for i in (0, 1, 3):
        pool.cache_block(blocks[i], (1, hashes[i]))
    read = iter(hashes)
    assert pool.get_cached_prefix(1, read) == (hashes[:3], blocks[:2])
    assert next(read) == hashes[3], "read farther than the first that is missing"
    assert pool.get_cached_prefix(0, hashes) == (hashes[:1], [])


def test_the_first_block_with_some_contents_stays_the_one_that_is_found() -> None:
    pool = BlockPool(2, 16)
    first, second = pool.allocate(2) or []
    for block in (first, second):
        pool.cache_block(block, (0, b"same"))
    assert pool.get_cached_block((0, b"same")) == first
    pool.evict(second)
    assert pool.get_cached_block((0, b"same")) == first
    pool.reset_prefix_cache()
    assert pool.get_cached_block((0, b"same")) is None
