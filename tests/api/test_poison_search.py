"""The request that kills engines is found in few deaths, and no other is blamed."""

from __future__ import annotations

import math
import random

import pytest

from quire.serving.api.poison_search import PoisonSearch


def deaths_until_blamed(num_requests: int, poison: set[int], most: int = 200) -> tuple[list[int], int]:
    """Runs requests through engines that die while they work on a poisonous one. Returns who was blamed, and how often
    an engine died."""
    search: PoisonSearch[int] = PoisonSearch()
    open_requests, blamed, deaths = set(range(num_requests)), list[int](), 0
    while poison & open_requests:
        running = {request for request in open_requests if search.may_run(request)}
        while not running & poison:
            on_trial = {request for request in running if search.is_on_trial(request)}
            assert on_trial, "nothing runs that could be acquitted"
            for request in on_trial:
                search.moved(request)
            running = {request for request in open_requests if search.may_run(request)}
        deaths += 1
        assert deaths < most
        found = search.engine_died(sorted(running))
        if found is not None:
            blamed.append(found)
            open_requests.remove(found)
            assert not search.searching
            assert all(search.may_run(request) for request in open_requests)
    return blamed, deaths


@pytest.mark.parametrize("num_requests", [1, 2, 3, 7, 64, 500])
def test_one_poisonous_request_is_found_wherever_it_stands(num_requests: int) -> None:
    for poison in {0, num_requests // 3, num_requests // 2, num_requests - 1}:
        blamed, deaths = deaths_until_blamed(num_requests, {poison})
        assert blamed == [poison]
        assert deaths <= math.ceil(math.log2(num_requests)) + 2


def test_several_are_found_one_after_the_other() -> None:
    rng = random.Random(7)
    for _ in range(50):
        poison = set(rng.sample(range(64), 3))
        blamed, _ = deaths_until_blamed(64, poison)
        assert set(blamed) == poison


def test_two_deaths_from_outside_blame_nobody() -> None:
    search: PoisonSearch[str] = PoisonSearch()
    assert search.engine_died(["a"]) is None
    search.moved("a")
    assert not search.unproven
    assert search.engine_died(["a"]) is None, "it has moved on since, so this is another first death"
    assert search.engine_died([]) is None, "a death while nothing was in flight says nothing"
    assert search.unproven


def test_a_request_that_ends_is_no_suspect_any_more() -> None:
    search: PoisonSearch[str] = PoisonSearch()
    search.engine_died(["a", "b", "c", "d"])
    search.engine_died(["a", "b", "c", "d"])
    assert [name for name in "abcdx" if search.may_run(name)] == ["a", "b"], "new ones wait, too"
    assert not search.moved("c"), "its client has left"
    assert not search.moved("a")
    assert search.moved("b"), "the other half may run now"
    assert [name for name in "abcdx" if search.may_run(name)] == ["a", "b", "d"]
    assert search.moved("d")
    assert not search.searching
    assert not search.unproven


def test_an_acquitted_request_is_not_blamed_for_what_happens_next() -> None:
    search: PoisonSearch[str] = PoisonSearch()
    search.engine_died(["a", "b"])
    search.engine_died(["a", "b"])
    search.moved("a")
    assert search.engine_died(["a", "b"]) == "b"
