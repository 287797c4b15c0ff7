"""Searches of all objects wait for a calm moment, but not for ever."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from quire.foundation.processes.garbage import (
    CALM_OBJECTS,
    CALM_SEQUENCES,
    begin_serving,
    collect_in_calm,
    collecting,
    no_collection,
    rare_collection,
)
from quire.foundation.processes.launch import Pulse, Report


@pytest.fixture
def searches() -> Iterator[list[int]]:
    """The generations that were searched, in a process that serves."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            found.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(50, 10, 10)
    begin_serving()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def make_objects(number: int) -> list[list[int]]:
    return [[] for _ in range(number)]


def test_a_crowd_is_not_searched_and_calm_is(searches: list[int]) -> None:
    kept = make_objects(20_000)
    collect_in_calm(CALM_SEQUENCES + 1)
    assert 1 in searches
    assert 2 not in searches
    collect_in_calm(CALM_SEQUENCES)
    assert searches.count(2) == 1
    collect_in_calm(0)
    assert searches.count(2) == 1, "nothing came since"
    del kept


def test_what_takes_long_to_search_waits_until_nobody_notices(searches: list[int]) -> None:
    kept = make_objects(CALM_OBJECTS + 100)
    collect_in_calm(1)
    assert 2 not in searches
    del kept
    collect_in_calm(1)
    assert searches.count(2) == 1
    kept = make_objects(CALM_OBJECTS + 100)
    collect_in_calm(0)
    assert searches.count(2) == 2
    del kept


def test_very_much_is_searched_whatever_is_open(searches: list[int]) -> None:
    kept = make_objects(200_000)
    assert 2 in searches
    del kept


def test_a_report_collects(searches: list[int]) -> None:
    reported: list[Report] = []
    kept = make_objects(20_000)
    send = collecting(reported.append, lambda: CALM_SEQUENCES + 1)
    send(Pulse())
    assert 2 not in searches
    collecting(reported.append, lambda: 3)(Pulse())
    assert searches.count(2) == 1
    assert len(reported) == 2
    del kept


def test_nothing_is_searched_within_and_all_is_as_before_afterwards(searches: list[int]) -> None:
    with no_collection():
        searches.clear()
        kept: list[list[int]] = [[] for _ in range(10_000)]
        assert searches == []
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            del kept
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_call_that_generates_is_seldom_searched(searches: list[int]) -> None:
    """In a program whose thresholds are Python's, and are afterwards."""
    gc.set_threshold(50, 10, 10)
    kept = make_objects(20_000)
    assert 2 in searches
    with rare_collection():
        searches.clear()
        kept += make_objects(20_000)
        assert 1 in searches
        assert 2 not in searches
        kept += make_objects(200_000)
        assert 2 in searches
    assert gc.get_threshold() == (50, 10, 10)
    del kept


def test_calls_that_overlap_leave_python_as_it_was() -> None:
    """Those of two threads: the second one ends last."""
    thresholds = gc.get_threshold()
    first, second = rare_collection(), rare_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds
