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


# --- retention -------------------------------------------------------------------------------------------------------


def cached_pool(num_blocks: int, most_retained: int) -> tuple[BlockPool, list[int]]:
    """A pool whose blocks are all free, with contents by their number."""
    pool = BlockPool(num_blocks, 16, most_retained)
    blocks = pool.allocate(num_blocks) or []
    for block in blocks:
        pool.cache_block(block, (0, bytes([block])))
    pool.free(reversed(blocks))
    return pool, blocks


def found(pool: BlockPool) -> list[int]:
    """The blocks that are cached."""
    return [block for block in range(1, pool.num_blocks + 1) if pool.get_cached_block((0, bytes([block])))]


def test_retained_blocks_are_allocated_last_and_the_beginning_of_a_prefix_after_its_end() -> None:
    pool, blocks = cached_pool(6, 3)
    pool.retain(blocks[:3], until=10.0)
    assert (pool.num_free, pool.num_retained) == (6, 3)
    pool.allocate(3)
    assert found(pool) == blocks[:3]
    assert pool.allocate(4) is None
    pool.allocate(1)
    assert found(pool) == blocks[:2]
    pool.share(blocks[:2])  # the session goes on
    assert (pool.num_free, pool.num_retained) == (0, 0)
    pool.free(reversed(blocks[:2]))
    assert (pool.num_free, pool.num_retained) == (2, 0)


def test_retained_blocks_go_when_their_time_is_over() -> None:
    pool, blocks = cached_pool(6, 6)
    pool.retain(blocks[:2], until=10.0)
    pool.retain(blocks[2:4], until=5.0)
    pool.release_expired(now=5.0)
    assert pool.num_retained == 2
    pool.share(blocks[:2])
    pool.free(reversed(blocks[:2]))
    pool.retain(blocks[:2], until=20.0)  # again, with an entry that is out of date
    pool.release_expired(now=10.0)
    assert pool.num_retained == 2
    pool.allocate(4)
    assert found(pool) == blocks[:2]
    pool.release_expired(now=20.0)
    assert (pool.num_free, pool.num_retained) == (2, 0)


def test_only_a_share_is_retained_and_the_first_goes_back() -> None:
    pool, blocks = cached_pool(8, 4)
    pool.retain(blocks[:3], until=10.0)
    pool.retain(blocks[3:5], until=10.0)
    assert pool.num_retained == 4
    pool.allocate(4)
    assert found(pool) == [*blocks[:2], *blocks[3:5]], "the first prefix has lost its end"
    pool, blocks = cached_pool(8, 4)
    pool.retain(blocks, until=10.0)
    pool.allocate(4)
    assert found(pool) == blocks[:4], "of a longer one, the beginning stays"
    pool, blocks = cached_pool(2, 0)
    pool.retain(blocks, until=10.0)
    assert pool.num_retained == 0


def test_blocks_without_contents_or_with_holders_are_not_retained() -> None:
    pool, blocks = cached_pool(4, 4)
    pool.share([blocks[0]])
    pool.evict(blocks[1])
    pool.retain(blocks[:3], until=10.0)
    assert pool.num_retained == 1
    pool.evict(blocks[2])
    assert (pool.num_free, pool.num_retained) == (3, 0)
    pool.retain(blocks[3:], until=10.0)
    pool.reset_prefix_cache()
    assert (pool.num_free, pool.num_retained) == (3, 0)


def test_what_is_retained_again_and_again_does_not_pile_up() -> None:
    pool, blocks = cached_pool(8, 8)
    for turn in range(1000):
        pool.retain(blocks, until=1e6 + turn)
        pool.share(blocks)
        pool.free(reversed(blocks))
    assert len(pool._retained_until) < 2000
