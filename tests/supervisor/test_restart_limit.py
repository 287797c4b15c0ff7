"""Restarts are bounded within a window, and those of a search do not count."""

from __future__ import annotations

from quire.serving.supervisor.watchdog import MAX_SEARCH, WINDOW_S, RestartLimit
from tests.engine.test_client_liveness import ManualClock


def test_so_many_within_the_window_and_no_more() -> None:
    clock = ManualClock()
    limit = RestartLimit(2, clock)
    assert [limit.allow(), limit.allow(), limit.allow()] == [True, True, False]
    clock.time += WINDOW_S + 1
    assert [limit.allow(), limit.used] == [True, 1]
    assert not RestartLimit(0, clock).allow()
    assert not RestartLimit(0, clock).allow(again=True)


def test_a_search_does_not_count_but_does_not_go_on_for_ever() -> None:
    limit = RestartLimit(2, ManualClock())
    assert all(limit.allow(again=True) for _ in range(MAX_SEARCH))
    assert limit.used == 0
    assert limit.allow(), "with other requests"
    assert all(limit.allow(again=True) for _ in range(MAX_SEARCH))
    assert [limit.allow(again=True) for _ in range(2)] == [True, False], "from here on it counts"
