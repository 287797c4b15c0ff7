"""Tables allocate, share, copy before writing, free what is out of a window, swap, and free everything."""

from __future__ import annotations

from collections.abc import Iterable

from quire.scheduling.kvcache.block_hashes import BlockHashes
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.block_table import BlockTable
from quire.scheduling.kvcache.cache_groups import FULL_ATTENTION, CacheGroup, Chunk, Window, capacity, max_cached_tokens

SIZE = 4


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    return BlockHashes(SIZE, salt).hash_up_to(tokens, len(tokens))


def matched(table: BlockTable, hashes: Iterable[bytes], length: int) -> int:
    """Tokens of the prefix that is found and shared."""
    match = table.match_prefix(hashes, length)
    table.share_prefix(match)
    return match.num_tokens


def test_a_table_grows_by_what_is_missing_or_not_at_all() -> None:
    pool = BlockPool(5, SIZE)
    table, other = BlockTable(pool, FULL_ATTENTION), BlockTable(pool, FULL_ATTENTION)
    first = table.reserve(0, 5)
    assert first is not None
    assert first.entries.indices == [0, 1]
    again = table.reserve(5, 8)
    assert again is not None
    assert not again.entries.blocks
    assert table.num_blocks_to_allocate(9, 64) == 1
    assert other.reserve(0, 12) is not None
    assert table.reserve(8, 9) is None
    assert table.num_blocks == 2
    other.free()
    assert table.reserve(8, 9) is not None
    table.free()
    assert pool.num_free == 5


def test_every_group_has_blocks_of_its_own() -> None:
    reservation = BlockTable(BlockPool(4, SIZE), FULL_ATTENTION * 2).reserve(0, 8)
    assert reservation is not None
    assert sorted(zip(reservation.entries.groups, reservation.entries.indices, strict=True)) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert len(set(reservation.entries.blocks)) == 4


def test_a_shared_partial_block_is_copied_by_whoever_writes_first_and_the_last_writes_in_place() -> None:
    pool = BlockPool(6, SIZE)
    parent, child = BlockTable(pool, FULL_ATTENTION), BlockTable(pool, FULL_ATTENTION)
    parent.reserve(0, 6)
    child.fork(parent, 6)
    assert pool.num_free == 4
    old = parent.entries().blocks
    written = child.reserve(6, 7)
    assert written is not None
    ((source, target),) = written.copies
    assert source == old[1]
    assert child.entries().blocks == [old[0], target]
    in_place = parent.reserve(6, 7)
    assert in_place is not None
    assert not in_place.copies
    parent.free()
    child.free()
    assert pool.num_free == 6


def test_a_copy_needs_a_free_block() -> None:
    pool = BlockPool(2, SIZE)
    parent, child = BlockTable(pool, FULL_ATTENTION), BlockTable(pool, FULL_ATTENTION)
    parent.reserve(0, 6)
    child.fork(parent, 6)
    assert child.reserve(6, 7) is None
    assert child.num_blocks == 2


def test_a_prefix_is_found_by_tokens_and_salt() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(11))
    first = BlockTable(pool, FULL_ATTENTION)
    first.reserve(0, 11)
    first.cache_blocks(hashes_of(tokens), 11)
    first.free()
    assert matched(BlockTable(pool, FULL_ATTENTION), hashes_of(tokens, "other"), 11) == 0
    assert matched(BlockTable(pool, FULL_ATTENTION), hashes_of([99, *tokens[1:]]), 11) == 0
    again = BlockTable(pool, FULL_ATTENTION)
    assert matched(again, hashes_of([*tokens[:8], 77, 78, 79, 80]), 11) == 8
    assert pool.num_free == 6
    again.free()
    assert pool.num_free == 8


def test_what_a_window_no_longer_sees_is_free_and_a_hit_needs_only_what_is_seen() -> None:
    pool = BlockPool(20, SIZE)
    groups = (CacheGroup(), CacheGroup(reach=Window(5)))
    tokens = list(range(16))
    table = BlockTable(pool, groups)
    table.reserve(0, 16)
    table.cache_blocks(hashes_of(tokens), 16)
    table.free_out_of_window(16)
    assert table.num_blocks == 4 + 1  # the next token sees 12 to 15 and itself
    table.free_out_of_window(17)
    assert table.num_blocks == 5
    table.free()
    again = BlockTable(pool, groups)
    assert matched(again, hashes_of(tokens), 16) == 16
    assert again.num_blocks == 5
    assert again.covers(16)
    assert not again.covers(14)


def test_blocks_of_earlier_chunks_are_free_and_a_hit_needs_only_its_own_chunk() -> None:
    pool = BlockPool(20, SIZE)
    groups = (CacheGroup(), CacheGroup(reach=Chunk(8)))
    tokens = list(range(16))
    table = BlockTable(pool, groups)
    table.reserve(0, 16)
    table.cache_blocks(hashes_of(tokens), 16)
    table.free_out_of_window(15)
    assert table.num_blocks == 4 + 2, "token 15 sees its chunk, which begins at 8"
    table.free_out_of_window(16)
    assert table.num_blocks == 4, "token 16 begins a chunk"
    table.free()
    again = BlockTable(pool, groups)
    assert matched(again, hashes_of(tokens), 12) == 12
    assert again.num_blocks == 3 + 1
    assert again.covers(12)
    assert not again.covers(7)


def test_a_hit_ends_where_a_group_has_lost_its_blocks() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(16))
    table = BlockTable(pool, (CacheGroup(reach=Window(4)),))
    table.reserve(0, 16)
    table.cache_blocks(hashes_of(tokens), 16)
    lost = table.entries().blocks[3]
    table.free()
    pool.evict(lost)
    assert matched(BlockTable(pool, (CacheGroup(reach=Window(4)),)), hashes_of(tokens), 16) == 12


def test_swapping_keeps_the_order_of_blocks() -> None:
    pool = BlockPool(4, SIZE)
    table = BlockTable(pool, FULL_ATTENTION)
    table.reserve(0, 10)
    device = table.entries().blocks
    out = table.swap_out([5, 6, 7])
    assert out == list(zip(device, [5, 6, 7], strict=True))
    assert pool.num_free == 4
    other = BlockTable(pool, FULL_ATTENTION)
    other.reserve(0, 8)
    assert table.swap_in() is None
    other.free()
    pairs = table.swap_in()
    assert pairs is not None
    assert [host for host, _ in pairs] == [5, 6, 7]
    assert table.entries().blocks == [block for _, block in pairs]


def test_what_a_window_has_left_is_not_swapped_in() -> None:
    pool = BlockPool(8, SIZE)
    table = BlockTable(pool, (CacheGroup(), CacheGroup(reach=Window(5))))
    table.reserve(0, 12)
    table.swap_out([1, 2, 3, 4, 5, 6])
    assert table.drop_unseen_swapped(11) == [4]
    pairs = table.swap_in()
    assert pairs is not None
    assert [host for host, _ in pairs] == [1, 2, 3, 5, 6]
    held = table.num_blocks
    table.free_out_of_window(11)
    assert table.num_blocks == held


def test_capacity_counts_what_all_groups_hold_at_once() -> None:
    assert capacity(FULL_ATTENTION, 10, 16, 64, 1_000) == 160
    assert capacity(FULL_ATTENTION, 10, 16, 64, 100) == 100
    assert capacity(FULL_ATTENTION * 2, 10, 16, 64, 1_000) == 80
    # a window of 20 moving by 12 holds at most (20 + 12) / 4 + 1 = 9 blocks
    assert capacity((CacheGroup(reach=Window(20)),), 9, 4, 12, 1_000) == 1_000
    assert capacity((CacheGroup(reach=Window(20)),), 8, 4, 12, 1_000) == 32
    assert capacity((CacheGroup(reach=Chunk(20)),), 9, 4, 12, 1_000) == 1_000
    assert capacity((CacheGroup(reach=Chunk(20)),), 8, 4, 12, 1_000) == 32


def test_what_the_pool_holds_counts_every_group() -> None:
    assert max_cached_tokens(FULL_ATTENTION, 10, 16, 64, 1_000) == 160
    assert max_cached_tokens(FULL_ATTENTION * 2, 10, 16, 64, 1_000) == 80
    # A sequence of 40 tokens takes 10 blocks of one group, and 9 of the other: 20 + 12 tokens, and one block more.
    assert max_cached_tokens((CacheGroup(), CacheGroup(reach=Window(20))), 38, 4, 12, 40) == 80


def test_hashes_are_a_chain_over_all_tokens_before() -> None:
    chain = BlockHashes(SIZE)
    tokens = list(range(12))
    assert chain.hash_up_to(tokens, 7)[:1] == hashes_of(tokens)[:1]
    assert chain.hash_up_to(tokens, 12) == hashes_of(tokens)
    assert hashes_of([1, *tokens[1:]])[2] != hashes_of(tokens)[2]
    branch = chain.branch(9)
    assert branch.hash_up_to([*tokens[:8], 0, 0, 0, 0], 12)[:2] == hashes_of(tokens)[:2]
    assert branch.hash_up_to(tokens, 12)[2] != hashes_of(tokens)[2]


def test_a_hit_is_looked_for_no_further_than_where_all_is_seen() -> None:
    pool, tokens = BlockPool(20, SIZE), list(range(40))
    first = BlockTable(pool, (CacheGroup(), CacheGroup(reach=Window(5))))
    first.reserve(0, 40)
    first.cache_blocks(hashes_of(tokens), 12)
    asked: list[bytes] = []
    chain = (asked.append(digest) or digest for digest in hashes_of(tokens))  # type: ignore[func-returns-value]
    assert matched(BlockTable(pool, (CacheGroup(), CacheGroup(reach=Window(5)))), chain, 40) == 12
    assert len(asked) == 4
