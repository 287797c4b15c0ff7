"""What is recorded is what was sent, up to what a cache holds."""

from __future__ import annotations

import random

from quire.serving.replica_chooser import PrefixRecord


def names(*blocks: int) -> list[bytes]:
    return [bytes([block]) for block in blocks]


def test_a_prompt_matches_as_far_as_each_replica_was_sent_its_beginning() -> None:
    record = PrefixRecord(3)
    assert record.matches(names(1, 2)) == [0, 0, 0]
    record.add(0, names(1, 2, 3), 10)
    record.add(2, names(1, 2, 4), 10)
    assert record.matches(names(1, 2, 3, 5)) == [3, 0, 2]
    assert record.matches(names(1)) == [1, 0, 1]
    assert record.matches([]) == [0, 0, 0]


def test_what_was_not_used_for_the_longest_time_is_forgotten_first() -> None:
    record = PrefixRecord(2)
    record.add(0, names(1, 2), 4)
    record.add(0, names(3, 4), 4)
    record.add(0, names(1, 2), 4)
    record.add(0, names(5, 6), 4)
    assert [record.matches(names(*pair))[0] for pair in ((1, 2), (3, 4), (5, 6))] == [2, 0, 2]


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    record = PrefixRecord(1)
    record.add(0, names(1, 2, 3), 4)
    record.add(0, names(5, 6), 4)
    assert record.matches(names(1, 2, 3)) == [2]
    record.add(0, names(7, 8, 9, 10, 11, 12), 4)
    assert record.matches(names(7, 8, 9, 10, 11, 12)) == [4], "of what is larger than the cache, too"


def test_a_cache_that_was_emptied_matches_nothing_and_leaves_the_others() -> None:
    record = PrefixRecord(2)
    for replica in (0, 1):
        record.add(replica, names(1, 2), 4)
    record.clear(0)
    assert record.matches(names(1, 2)) == [0, 2]
    record.clear(1)
    assert len(record) == 0


def test_it_never_grows_beyond_what_the_caches_hold() -> None:
    rng, record = random.Random(0), PrefixRecord(3)
    for _ in range(500):
        record.add(rng.randrange(3), names(*(rng.randrange(200) for _ in range(rng.randrange(12)))), 20)
        assert len(record) <= 60
