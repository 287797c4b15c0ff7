"""Which host blocks are handed out together."""

from __future__ import annotations

import itertools
import random

import pytest

from quire.scheduling.kvcache.host_pool import HostPool


def number_of_runs(blocks: list[int]) -> int:
    return 1 + sum(after != before + 1 for before, after in itertools.pairwise(blocks))


def test_every_block_has_one_holder_at_most() -> None:
    choose, pool = random.Random(1), HostPool(50)
    held: list[list[int]] = []
    for _ in range(500):
        if held and choose.random() < 0.5:
            pool.free(held.pop(choose.randrange(len(held))))
        else:
            held.append(pool.allocate(choose.randint(0, pool.num_free)))
        numbers = [block for blocks in held for block in blocks]
        assert len(set(numbers)) == len(numbers) == 50 - pool.num_free
        assert set(numbers) <= set(range(50))


def test_blocks_are_one_run_whatever_came_back_in_which_order() -> None:
    pool = HostPool(100)
    first, second, third = pool.allocate(30), pool.allocate(20), pool.allocate(40)
    pool.free(reversed(second))
    assert number_of_runs(pool.allocate(15)) == 1
    pool.free(first)
    assert number_of_runs(pool.allocate(30)) == 1
    pool.free(third)
    assert pool.allocate(50) == list(range(45, 95)), "what came back is joined with what was free"


def test_a_gap_that_fits_is_taken_before_a_larger_one() -> None:
    pool = HostPool(100)
    gap = pool.allocate(10)
    pool.allocate(10)
    pool.free(gap)
    assert pool.allocate(10) == gap
    assert pool.allocate(80) == list(range(20, 100))


def test_blocks_come_from_few_gaps_where_none_has_them_all() -> None:
    pool = HostPool(60)
    parts = [pool.allocate(10) for _ in range(6)]
    for part in parts[::2]:
        pool.free(part)
    assert number_of_runs(pool.allocate(25)) == 3


def test_blocks_that_become_ready_later_join_those_that_are_free() -> None:
    pool = HostPool()
    assert (pool.num_blocks, pool.num_free) == (0, 0)
    pool.grow(10)
    first = pool.allocate(4)
    pool.grow(0)
    pool.grow(10)
    assert (pool.num_blocks, pool.num_free) == (10, 6), "what is known already changes nothing"
    pool.grow(30)
    assert pool.allocate(26) == list(range(4, 30)), "one run"
    pool.grow(31)
    pool.free(first)
    assert pool.allocate(5) == [0, 1, 2, 3, 30]


def test_a_block_comes_back_once() -> None:
    pool = HostPool(4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(blocks)
